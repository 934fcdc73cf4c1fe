"""What tests of parity share: models with every oddity, uneven batches, and the comparison of two states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands.data.base import Batch, Request
from manyhands.data.order import BatchShare

State = dict[str, Tensor]
FEATURES, CLASSES = 6, 3


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 37), nn.Tanh(), nn.Linear(37, CLASSES))


def tied_and_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES), plain())
    model[2].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    return model


class Sometimes(nn.Module):
    """Branches that are used in some steps only, by some samples, or never; a scalar; odd registration."""

    def __init__(self) -> None:
        super().__init__()
        self.z_last = nn.Linear(FEATURES, CLASSES)
        self.never = nn.Linear(3, 3)
        self.rare = nn.Linear(FEATURES, CLASSES)
        self.alone = nn.Parameter(torch.tensor(0.5))
        self.a_first = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("constant", torch.rand(5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.z_last(self.a_first(x).tanh()) * self.alone
        odd = x[:, 0] > 1.0
        if odd.any():  # at some workers in some steps
            out = out + self.rare(x) * odd[:, None]
        return out


class Mixed(nn.Module):
    """Parameters of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 5).double()
        self.second = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).tanh().float()).double()
        return out


class Strided(nn.Module):
    """Parameters whose memory is not in the order of their indices."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.turned = nn.Parameter(torch.randn(CLASSES, 8).t())

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.view(-1, 1, 2, 3)).flatten(1) @ self.turned


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(11, CLASSES, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rows((x * 3).long().abs() % 11).sum(1)
        return out


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES))


def make(model: Callable[[], nn.Module]) -> nn.Module:
    """The same parameters each time, in double precision."""
    torch.manual_seed(3)
    made = model()
    return made if isinstance(made, Mixed) else made.double()


def batches(sizes: Sequence[int], features: int = FEATURES) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    return [
        Batch(
            torch.randn(size, features, dtype=torch.float64, generator=generator),
            torch.randint(0, CLASSES, (size,), generator=generator),
        )
        for size in sizes
    ]


def parts_of(batch: Batch, share: BatchShare) -> list[Batch]:
    """A worker's micro-batches of a global batch."""
    parts = [torch.from_numpy(part.samples.copy()) for part in share.of(Request(0, np.arange(batch.size)))]
    return [Batch(batch.inputs[part], batch.targets[part]) for part in parts]


def share(batch: Batch, rank: int, workers: int, accumulate: int = 1) -> list[Batch]:
    return parts_of(batch, BatchShare(rank, workers, accumulate))


class Made(TorchDispatchMode):
    """Notes the bytes of the largest tensor that is made, with memory of its own, while it is entered."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        for made in out if isinstance(out, list | tuple) else [out]:
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, made.nbytes)
        return out


class OnlyModel(dict[str, Tensor]):
    """Of a worker that is not the first: what it has of a state without asking anybody."""


def held(worker: Any, rank: int, *, shards: bool = False) -> State:
    """The state, which rank 0 must have; where another has none, its model's tensors."""
    state = copied(worker.state())
    assert state or rank, "rank 0 has no state"
    with worker.consolidated() if shards else nullcontext():  # all of them enter
        tensors = copied(worker.model.state_dict())
    return state or OnlyModel({f"model/{name}": tensor for name, tensor in tensors.items()})


def _of_it(actual: State, expected: State) -> State:
    """What can be expected of it."""
    if not isinstance(actual, OnlyModel):
        return expected
    return {name: tensor for name, tensor in expected.items() if name.startswith("model/")}


def copied(state: Mapping[str, Tensor]) -> State:
    """As it is now, whatever happens to the worker."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def close(actual: State, expected: State, tolerance: float = 1e-11, skip: Sequence[str] = ()) -> None:
    """But for names that end so, and for what local SGD notes beside its state."""
    expected = _of_it(actual, expected)
    assert {name for name in actual if not name.startswith("average/")} == expected.keys()
    for name, tensor in expected.items():
        if not name.endswith(tuple(skip) or ("\0",)):
            assert actual[name].shape == tensor.shape, name
            worst = (actual[name].double() - tensor.double()).abs().max().item() if tensor.numel() else 0.0
            bound = 1e-5 if tensor.dtype == torch.float32 and tensor.dim() else tolerance
            assert worst <= bound, f"{name} differs by {worst}"


def equal(actual: State, expected: State) -> None:
    """To the last bit."""
    expected = _of_it(actual, expected)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
