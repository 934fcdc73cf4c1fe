"""Several optimizers that step as one: Muon for matrices and AdamW for the rest, say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

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

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of each, with the current gradients: a closure would be evaluated by each of them."""
        for each in self.optimizers:
            each.step()
