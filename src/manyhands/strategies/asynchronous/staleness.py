"""Staleness-aware updates: the learning rate of a stale gradient is divided by its staleness.

Zhang et al. (arXiv 1511.05950) define it for SGD, w <- w - (lr / s) g. With momentum the learning rate
multiplies the whole velocity, so that a smaller one would also hold back all gradients of the past:

    lr / s for the step        v <- m v + g        w <- w - (lr / s) (m v + g)      all of the past too
    what is meant              v <- m v + g / s    w <- w - lr (m v + g / s)

The second is the first with a velocity that is multiplied by s before the step and divided by s after it.
So weight decay and the trust ratios of LARS, which are part of the incoming gradient, are divided too.
Without momentum it is plain SGD at lr / s, bit for bit.

Adam and LAMB divide by the size of the gradients themselves, so a gradient divided by s would make nearly the
same step. For them the learning rate of the whole step is divided, which makes the step that much shorter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer


@contextmanager
def velocity_kept(optimizer: Optimizer, divisor: int) -> Iterator[None]:
    """Inside, a step at a divided learning rate divides only the new gradient, not the velocity."""
    if divisor == 1:
        yield
        return
    for velocity in _velocities(optimizer):
        velocity.mul_(divisor)
    yield
    for velocity in _velocities(optimizer):  # looked up again: the first step creates some
        velocity.div_(divisor)


def _velocities(optimizer: Optimizer) -> list[Tensor]:
    """The velocities of the parameters that a step will move."""
    moved = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    found = [optimizer.state.get(parameter, {}).get("momentum_buffer") for parameter in moved]
    return [velocity for velocity in found if isinstance(velocity, Tensor)]
