"""Activations that are recomputed: a module is run again from its inputs when backward needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from manyhands.data.trees import Tree


def recomputed(module: nn.Module, inputs: Tree) -> Tree:
    """The outputs of a module. autograd only saves its inputs, and dropout draws the same masks again."""

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _statistics_kept(module)

    return checkpoint(module, inputs, use_reentrant=False, context_fn=contexts)


@contextmanager
def _statistics_kept(module: nn.Module) -> Iterator[None]:
    """During recomputation, batch norms update copies of their running statistics, which are discarded.

    If the updates were turned off, the norms would save fewer tensors than before, which autograd refuses.
    """
    norms = [m for m in module.modules() if isinstance(m, _NormBase)]
    counting = [norm for norm in norms if norm.track_running_stats and norm.training]  # not the frozen ones
    own = [dict(norm._buffers) for norm in counting]
    for norm, buffers in zip(counting, own, strict=True):
        norm._buffers.update(
            {name: buffer if buffer is None else buffer.clone() for name, buffer in buffers.items()}
        )
    try:
        yield
    finally:
        for norm, buffers in zip(counting, own, strict=True):
            norm._buffers.update(buffers)
