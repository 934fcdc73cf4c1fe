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
    from manyhands.callbacks.base import Callback
    from manyhands.data.arrays import ArrayData
    from manyhands.data.base import Batch, Dataset, Request
    from manyhands.data.map_style import MapData
    from manyhands.records.record import RunRecord, StepRecord
    from manyhands.records.spec import RunSpec
    from manyhands.report.notebook import load, report
    from manyhands.runs.doctor import doctor
    from manyhands.runs.train import train
    from manyhands.runs.verify import verify
    from manyhands.study.python_study import study
    from manyhands.tasks.base import Defaults, Metric, Scale, Task, accuracy

__version__ = VERSION
logging.getLogger(__name__).addHandler(logging.NullHandler())  # a host program adds its own

# Imported when first asked for, so that `import manyhands` does not import torch.
_NAMES = {
    "train": "manyhands.runs.train",
    "verify": "manyhands.runs.verify",
    "study": "manyhands.study.python_study",
    "report": "manyhands.report.notebook",
    "doctor": "manyhands.runs.doctor",
    "load": "manyhands.report.notebook",
    "RunSpec": "manyhands.records.spec",
    "RunRecord": "manyhands.records.record",
    "StepRecord": "manyhands.records.record",
    "Task": "manyhands.tasks.base",
    "Metric": "manyhands.tasks.base",
    "Defaults": "manyhands.tasks.base",
    "Scale": "manyhands.tasks.base",
    "accuracy": "manyhands.tasks.base",
    "Callback": "manyhands.callbacks.base",
    "ArrayData": "manyhands.data.arrays",
    "MapData": "manyhands.data.map_style",
    "Dataset": "manyhands.data.base",
    "Batch": "manyhands.data.base",
    "Request": "manyhands.data.base",
}
__all__ = [
    "ArrayData",
    "Batch",
    "Callback",
    "Dataset",
    "Defaults",
    "MapData",
    "Metric",
    "Request",
    "RunRecord",
    "RunSpec",
    "Scale",
    "StepRecord",
    "Task",
    "accuracy",
    "doctor",
    "load",
    "report",
    "study",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'manyhands' has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
