"""Before the first step: the same model at every worker, down to the values of its buffers."""

from __future__ import annotations

import zlib

import torch
from torch import nn

from manyhands.core.errors import ManyhandsError
from manyhands.transports.base import Collectives


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, tied ones once, by name.

    Sorted, so that workers agree on where each lies whatever the order in which they were registered.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return dict(sorted(named.items()))


def check_same_model(model: nn.Module, transport: Collectives) -> None:
    """Names, shapes, types and what is trained are equal everywhere, or the sentence that says where not."""
    tensors = sorted(model.state_dict(keep_vars=True).items())
    text = repr([(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors])
    mine = torch.tensor([zlib.crc32(text.encode())])
    for rank, other in enumerate(transport.all_gather(mine)):
        if not torch.equal(mine.cpu(), other.cpu()):
            raise ManyhandsError(
                f"worker {rank} built another model than worker {transport.rank}: its parameters or buffers "
                "have other names, shapes or types"
            )


def spread_buffers(model: nn.Module, transport: Collectives) -> None:
    """Rank 0's buffers everywhere."""
    if transport.size > 1:
        for buffer in model.buffers():
            transport.broadcast(buffer)
