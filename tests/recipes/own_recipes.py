"""Recipes and schedules as users write them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Named = Iterable[tuple[str, nn.Parameter]]


def by_nadam(named_parameters: Named, batch: int, decay: float = 0.01) -> Optimizer:
    return torch.optim.NAdam([p for _, p in named_parameters], lr=0.01 * batch / 65, weight_decay=decay)


def by_muon(named_parameters: Named, batch: int) -> list[Optimizer]:
    """Muon for hidden matrices, another optimizer for the rest, as its authors say."""
    named = list(named_parameters)
    matrices = [p for name, p in named if p.ndim == 2 and not name.startswith("5")]
    rest = [p for _, p in named if not any(p is each for each in matrices)]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.NAdam(rest, lr=0.005)]


def by_adafactor(named_parameters: Named, batch: int) -> Optimizer:
    return torch.optim.Adafactor([p for _, p in named_parameters], lr=0.05)


def in_groups(named_parameters: Named, batch: int, clip: float = 0.5) -> Optimizer:
    """Biases learn ten times as fast."""
    named = list(named_parameters)
    weights = [p for name, p in named if name.endswith("weight")]
    biases = [p for name, p in named if name.endswith("bias")]
    return torch.optim.SGD([{"params": weights}, {"params": biases, "lr": 1.0}], lr=0.1, momentum=0.9)


class Signs(Optimizer):
    """An optimizer of one's own, as older ones are written: it counts its steps in Python."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.floor = 1e-3  # an attribute that pickling would lose

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    state["mean"] = state.get("mean", torch.zeros_like(parameter)).lerp(parameter.grad, 0.5)
                    size = group["lr"] / (1 + 0.1 * state["count"]) + self.floor
                    parameter.sub_(state["mean"].sign(), alpha=size)


def by_signs(named_parameters: Named, batch: int) -> Optimizer:
    return Signs([p for _, p in named_parameters], lr=0.01)


class Normalized(Optimizer):
    """It needs all parameters: their common gradient has a norm of 1."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held: list[Tensor] = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.square().sum() for p in held]).sum().sqrt()  # type: ignore[union-attr]
        for parameter in held:
            assert parameter.grad is not None
            parameter.sub_(parameter.grad / norm, alpha=self.param_groups[0]["lr"])


def together(named_parameters: Named, batch: int) -> Optimizer:
    return Normalized([p for _, p in named_parameters], lr=0.05)


def all_but_one(named_parameters: Named, batch: int) -> Optimizer:
    return torch.optim.SGD([p for _, p in list(named_parameters)[1:]], lr=0.1)


def warm(samples: int) -> float:
    return 0.02 * min(1.0, (65 + samples) / 260)


# ---- what cannot work


def one_argument(named_parameters: Named) -> Optimizer:
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)


def three_arguments(named_parameters: Named, batch: int, more: int) -> Optimizer:
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)


def nothing(named_parameters: Named, batch: int) -> None:
    return None


def with_scheduler(named_parameters: Named, batch: int) -> Any:
    optimizer = torch.optim.SGD([p for _, p in named_parameters], lr=0.1)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)


def fails(named_parameters: Named, batch: int) -> Optimizer:
    return torch.optim.SGD(dict(named_parameters)["no.such"], lr=0.1)  # type: ignore[arg-type]


def by_lbfgs(named_parameters: Named, batch: int) -> Optimizer:
    return torch.optim.LBFGS([p for _, p in named_parameters])


def strangers(named_parameters: Named, batch: int) -> Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)


class Counting(Signs):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1


def counts_in_groups(named_parameters: Named, batch: int) -> Optimizer:
    return Counting([p for _, p in named_parameters], lr=0.1)


class Listing(Signs):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["past"] = [1, 2]


def keeps_lists(named_parameters: Named, batch: int) -> Optimizer:
    return Listing([p for _, p in named_parameters], lr=0.1)


def zero(named_parameters: Named, batch: int) -> Optimizer:
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.0)


def misdeclared(named_parameters: Named, batch: int) -> Optimizer:
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)


misdeclared.scope = "rows"  # type: ignore[attr-defined]


def declared(named_parameters: Named, batch: int) -> Optimizer:
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)


declared.scope = "model"  # type: ignore[attr-defined]

A_NUMBER = 3


def negative(samples: int) -> float:
    return -1.0


def text(samples: int) -> Any:
    return "fast"


def number_as_text(samples: int) -> str:
    return "0.1"
