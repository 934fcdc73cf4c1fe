"""The trained model of a run, in plain PyTorch; behind `RunRecord.model()` and `RunRecord.state_dict()`."""

from __future__ import annotations

from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from manyhands.core.errors import UsageError
from manyhands.data import generators
from manyhands.records.record import RunRecord
from manyhands.records.run_folder import RunFolder
from manyhands.records.trust import check_trust
from manyhands.tasks import find, keras_model


def state_dict(record: RunRecord, *, best: bool = False) -> dict[str, Tensor]:
    """The tensors of the trained model, or of the best evaluation, by their names in the model."""
    folder = RunFolder(record.folder)
    file = folder.best if best else folder.model
    if best and not file.is_file():
        raise UsageError(f"{record.folder} has no {file.name}: train with keep_best=True (--keep-best)")
    if not file.is_file():
        raise UsageError(
            f"{record.folder} has no trained model: the run has not ended, or {file.name} was moved; "
            f"continue it with: manyhands train --resume {record.folder}"
        )
    return safetensors.torch.load_file(file)


def model(record: RunRecord, *, best: bool = False, trust: bool = False) -> Any:
    """The task's model with the trained tensors, in evaluation mode; its task file is imported."""
    folder = RunFolder(record.folder)
    stored, signed = folder.spec_and_signature()
    check_trust(folder, stored, signed or trust, lambda text: None)
    with generators.kept():
        torch.manual_seed(record.spec.seed)
        made = find.build(stored.task, stored.options).build()
    held, tensors = made.state_dict(), state_dict(record, best=best)
    if held.keys() != tensors.keys() and [t.shape for t in held.values()] == [
        t.shape for t in tensors.values()
    ]:
        tensors = dict(zip(held, tensors.values(), strict=True))  # each build gives its tensors new numbers
    made.load_state_dict(tensors)
    return keras_model.plain(made.eval())
