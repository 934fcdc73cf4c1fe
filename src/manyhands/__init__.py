"""manyhands: train a PyTorch model with many workers, and know what each way of doing so costs.

Public are the names in `__all__`, the command line, and `manyhands.testing`. All other modules are internal:
they may change in any release.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from manyhands.core.version import VERSION

if TYPE_CHECKING:
    from manyhands.data.arrays import ArrayData
    from manyhands.records.record import RunRecord, StepRecord
    from manyhands.records.spec import RunSpec
    from manyhands.report.notebook import load
    from manyhands.runs.train import train
    from manyhands.tasks.base import Defaults, Metric, Scale, Task, accuracy

__version__ = VERSION
logging.getLogger(__name__).addHandler(logging.NullHandler())  # a host program adds its own

# Imported when first asked for, so that `import manyhands` does not import torch.
_NAMES = {
    "train": "manyhands.runs.train",
    "load": "manyhands.report.notebook",
    "RunSpec": "manyhands.records.spec",
    "RunRecord": "manyhands.records.record",
    "StepRecord": "manyhands.records.record",
    "Task": "manyhands.tasks.base",
    "Metric": "manyhands.tasks.base",
    "Defaults": "manyhands.tasks.base",
    "Scale": "manyhands.tasks.base",
    "accuracy": "manyhands.tasks.base",
    "ArrayData": "manyhands.data.arrays",
}
__all__ = [
    "ArrayData",
    "Defaults",
    "Metric",
    "RunRecord",
    "RunSpec",
    "Scale",
    "StepRecord",
    "Task",
    "accuracy",
    "load",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'manyhands' has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
