"""How far a run has come: saved in every checkpoint, beside the tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

Ending = Literal["finished", "target", "interrupted"]

Count = Annotated[int, Field(ge=0, le=2**53)]
Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]


@dataclass
class Position:
    """How far a run has come; saved with every checkpoint, and read back against these bounds."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    step: Count = 0
    samples: Count = 0
    loss: float = math.nan
    metric: float | None = None
    best_metric: float | None = None
    target_samples: Count | None = None
    target_seconds: Seconds | None = None
    target_steps: Count | None = None
    resumed: Count = 0
    curve: list[dict[str, Any]] = field(default_factory=list)  # evaluations, as dumped by `Evaluation`
