"""Several optimizers that step as one: Muon for matrices and AdamW for the rest, say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch.optim import Optimizer


@final
class Several(Optimizer):
    """Their groups and their state are shared with it, so that whoever changes one changes both."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        # torch refuses a parameter that occurs twice
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        for each in optimizers:
            self.state.update(each.state)
            each.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of each."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self.optimizers:
            each.step()
        return loss
