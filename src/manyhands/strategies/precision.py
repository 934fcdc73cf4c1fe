"""The precision in which a worker computes: full, or mixed with bfloat16 or float16 by torch's autocast.

Parameters, gradients and the optimizer state stay in float32 in any case; autocast computes matrix products
and convolutions in the narrow type. Small gradients vanish in float16, so for it the loss is multiplied by a
scale before backward, and gradients are divided by it before the update. Gradients that overflow show that
the scale is too large: then the step is skipped, and the scale halved. After many steps without overflow it
is doubled.

torch's GradScaler looks at the gradients of one process. Here the workers that step together must skip
together, so the overflow of one is a vote that travels with the step, and all their scales stay equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from manyhands.core.errors import DivergedError

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}

# as torch's GradScaler has them
FIRST_SCALE = 2.0**16
GROW_AFTER = 2000  # steps without overflow
LARGEST_SCALE, SMALLEST_SCALE = 2.0**24, 2.0**-14


class Precision:
    """Full precision: nothing is cast or scaled. The null member."""

    scale = 1.0  # of the loss
    skipped = 0  # steps

    def autocast(self) -> AbstractContextManager[Any]:
        """Inside, a model and its loss are computed in this precision."""
        return nullcontext()

    def overflows(self, gradients: Iterable[Tensor]) -> bool:
        """Whether gradients are not finite, where that means that the scale is too large."""
        return False

    def stepped(self, *, skipped: bool) -> None:
        """Count a step."""

    def state(self) -> dict[str, float]:
        """What a checkpoint must hold."""
        return {}

    def load_state(self, state: dict[str, float]) -> None:
        """Continue from what `state` returned."""


class Mixed(Precision):
    """Autocast to a narrow type, without scaling: bfloat16 has the range of float32."""

    def __init__(self, device: torch.device, narrow: torch.dtype) -> None:
        self._device, self._narrow = device.type, narrow

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device, self._narrow)


class Scaled(Mixed):
    """Autocast to float16, with a scale that follows the gradients."""

    def __init__(self, device: torch.device, narrow: torch.dtype) -> None:
        super().__init__(device, narrow)
        self.scale, self.skipped, self._good = FIRST_SCALE, 0, 0

    def overflows(self, gradients: Iterable[Tensor]) -> bool:
        found = [torch.isfinite(g._values() if g.is_sparse else g).all() for g in gradients]
        return bool(found) and not bool(torch.stack(found).all())

    def stepped(self, *, skipped: bool) -> None:
        """Halve the scale after an overflow; double it after many steps without one."""
        if skipped:
            self.scale, self._good, self.skipped = self.scale / 2, 0, self.skipped + 1
            if self.scale < SMALLEST_SCALE:
                raise DivergedError(
                    f"gradients overflow in float16 even where the loss is scaled by {self.scale:.0e}: a "
                    "smaller --lr, gradient clipping (--set recipe.clip=1) or --precision bf16 may help"
                )
            return
        self._good += 1
        if self._good >= GROW_AFTER:
            self.scale, self._good = min(2 * self.scale, LARGEST_SCALE), 0

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "good": self._good, "skipped": self.skipped}

    def load_state(self, state: dict[str, float]) -> None:
        if state:
            self.scale = state["scale"]
            self._good, self.skipped = int(state["good"]), int(state["skipped"])


def precision_of(name: str, device: torch.device) -> Precision:
    """The precision of this name: full, bf16 or fp16."""
    if name == "full":
        return Precision()
    return (Scaled if name == "fp16" else Mixed)(device, NARROW[name])
