"""Before the first step: the same model at every worker, down to the values of its buffers."""

from __future__ import annotations

import zlib

import torch
from torch import nn

from manyhands.core.errors import ManyhandsError
from manyhands.transports.base import Collectives


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, tied ones once, by name.

    Sorted, so that all workers agree on the layout whatever the order of registration.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return dict(sorted(named.items()))


def check_same_model(model: nn.Module, transport: Collectives) -> None:
    """Check that names, shapes, types and trained parameters are equal at every worker."""
    tensors = sorted(model.state_dict(keep_vars=True).items())
    text = repr([(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors])
    own = torch.tensor([zlib.crc32(text.encode())])
    for rank, other in enumerate(transport.all_gather(own)):
        if not torch.equal(own.cpu(), other.cpu()):
            raise ManyhandsError(
                f"worker {rank} built another model than worker {transport.rank}: its parameters or buffers "
                "have other names, shapes or types"
            )


def broadcast_buffers(model: nn.Module, transport: Collectives) -> None:
    """Copy rank 0's buffers to every worker."""
    if transport.size > 1:
        for buffer in model.buffers():
            transport.broadcast(buffer)
