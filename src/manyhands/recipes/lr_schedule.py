"""A schedule is the learning rate as a function of samples seen, and of nothing else (law 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Decay = Literal["none", "step", "cosine"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Warm-up times decay, all lengths in samples.

    ```
    peak            ________            step: times `factor` at each milestone
                   /        |___        cosine: half a wave from the end of the warm-up to 0 at the horizon
    start         /             |___
                  0  warmup      horizon
    ```
    The two are multiplied, so a milestone may lie inside the warm-up.
    """

    start: float
    peak: float
    warmup: int
    horizon: int
    decay: Decay
    milestones: tuple[int, ...]
    factor: float

    def __call__(self, samples: int) -> float:
        """The learning rate of the step that begins after `samples` samples. After the horizon it stays."""
        seen = min(samples, self.horizon)
        return self._warm(seen) * self._decayed(seen)

    def _warm(self, seen: int) -> float:
        if seen >= self.warmup:
            return self.peak
        # rounding must not lift the learning rate above the peak
        return min(self.peak, self.start + (self.peak - self.start) * (seen / self.warmup))

    def _decayed(self, seen: int) -> float:
        if self.decay == "step":
            passed = sum(seen >= milestone for milestone in self.milestones)
            return self.factor**passed
        # after a warm-up as long as the run there is no decay
        if self.decay == "cosine" and self.warmup < self.horizon and seen > self.warmup:
            done = (seen - self.warmup) / (self.horizon - self.warmup)
            return 0.5 * (1.0 + math.cos(math.pi * done))
        return 1.0
