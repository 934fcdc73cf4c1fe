"""A stale gradient counts less: its rate is divided by its staleness, and that of the ones before it is not.

Zhang et al. (arXiv 1511.05950) define it for SGD, w <- w - (lr / s) g. With momentum the rate multiplies the
whole velocity, so that a smaller one would hold back all gradients of the past with the one that is stale:

    lr / s for the step        v <- m v + g        w <- w - (lr / s) (m v + g)      all of the past too
    what is meant              v <- m v + g / s    w <- w - lr (m v + g / s)

The second is the first with a velocity that is s times as large before the step and is divided by s after
it. So weight decay and the trust ratios of LARS, which are a part of what comes in, are divided alike; and
without momentum it is plain SGD at lr / s, bit for bit.

Adam and LAMB divide by the size of the gradients themselves: a gradient divided by s would make nearly the
same step. For them the rate of the whole step is divided, which at least makes the step that much shorter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer


@contextmanager
def velocity_kept(optimizer: Optimizer, divisor: int) -> Iterator[None]:
    """Around a step whose rate was divided: only what comes in is divided, not what the velocity has."""
    if divisor == 1:
        yield
        return
    for velocity in _velocities(optimizer):
        velocity.mul_(divisor)
    yield
    for velocity in _velocities(optimizer):  # asked for again: some are made by the first step
        velocity.div_(divisor)


def _velocities(optimizer: Optimizer) -> list[Tensor]:
    """Of the parameters that a step will move: the others' are left alone."""
    moved = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    found = [optimizer.state.get(parameter, {}).get("momentum_buffer") for parameter in moved]
    return [velocity for velocity in found if isinstance(velocity, Tensor)]
