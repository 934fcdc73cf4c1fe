"""Law 5 and law 6 for pipelines: the worker that fails is named, and what its neighbors waited for."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import manyhands as mh
from faults.test_matrix import injected_at, left_behind
from manyhands.core.errors import WorkerFailedError
from manyhands.engine.fault_injection import faults
from manyhands.records.run_folder import RunFolder

KILLED = r"was killed by signal 9 \(SIGKILL, often because memory ran out\)"
RAISED = r"raised ScriptedError: raised by script at rank \d, step 8"
HANGS = r"has been hanging for \d[\d.]* s"
# fault: what the message says, in which phase, and what the neighbor waited for: the first stage waits for
# gradients, the last for activations
FAULTS = {
    "SIGKILL@0:8:data": (KILLED, "data", "activation"),
    "SIGKILL@0:8": (KILLED, r"\w+ [\d,]+", "activation"),
    "SIGKILL@1:8": (KILLED, r"\w+ [\d,]+", "gradient"),
    "raise@0:8:backward": (RAISED, "backward", "activation"),
    "raise@1:8:backward": (RAISED, "backward", "gradient"),
    "hang@0:8:data": (HANGS, "data", "activation"),
    "hang@1:8:backward": (HANGS, "backward", "gradient"),
}
# A death, an exception and a hang, each at one of the stages, and both stages; `make soak` runs the others.
OFTEN = ("SIGKILL@0:8:data", "SIGKILL@1:8", "raise@0:8:backward", "hang@1:8:backward")
TIMEOUT = 2.0  # seconds: a shared machine may stall a process for one
TASK = """
import torch, manyhands as mh
from torch import nn

def noisy() -> mh.Task:
    inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    data = mh.ArrayData(inputs, (inputs.sum(1) > 0).long())
    model = lambda: nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(inplace=True), nn.Dropout(0.3),
        nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 2))
    loss = nn.functional.cross_entropy
    return mh.Task(name="noisy", model=model, train=data, test=data, loss=loss, target=0.99)
"""


def train(out: Path, task: str = "digits-mlp", **settings: Any) -> mh.RunRecord:
    options = {"micro_batches": 4, **settings.pop("options", {})}
    given = {"workers": 2, "strategy": "pipeline", "strategy_options": options, "threads": 1, **settings}
    return mh.train(task, out=out, quiet=True, **given)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [*OFTEN, *(pytest.param(fault, marks=pytest.mark.soak) for fault in FAULTS if fault not in OFTEN)],
)
def test_a_fault_ends_the_run(fault: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, fault)
    with pytest.raises(WorkerFailedError) as caught:
        train(here / "run", epochs=10_000, timeout=TIMEOUT)
    seconds = time.time() - injected_at(here / "run")
    happened, doing, awaited = FAULTS[fault]
    rank = int(fault.partition("@")[2][0])
    first, *rest = str(caught.value).splitlines()
    assert re.fullmatch(
        rf"worker {rank} of 2 \(host \S+, pid \d+\) {happened} at step 8, in {doing}", first
    ), first
    other = rf"worker {1 - rank} was (waiting )?in {awaited} [\d,]+.*; it was stopped after .*"
    assert re.fullmatch(other, rest[-2]), rest
    assert rest[-1].endswith(f" with: manyhands train --resume {here / 'run'}")
    assert seconds < 30  # a few on a quiet machine, but not the half hour that a wait may last
    assert left_behind(here) == []


@pytest.mark.slow
def test_killed_it_ends_with_the_same_bits(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL of the last stage, then of the first; dropout and norms on both sides of the cut."""
    (here / "noisy.py").write_text(TASK)
    settings = {"epochs": 3, "batch": 40, "checkpoint_every": 0, "options": {"cut": [4], "micro_batches": 3}}
    train(here / "whole", "noisy.py:noisy", **settings)
    for fault in ("SIGKILL@1:9", "SIGKILL@0:21:backward"):
        monkeypatch.setenv(faults.VARIABLE, fault)
        with pytest.raises(WorkerFailedError, match=r"was killed by signal 9"):
            train(here / "killed", "noisy.py:noisy", resume=True, **settings)
    monkeypatch.delenv(faults.VARIABLE)
    record = train(here / "killed", "noisy.py:noisy", resume=True, **settings)
    assert record.resumed == 2
    models = [load_file(RunFolder(here / name).model) for name in ("whole", "killed")]
    for name, tensor in models[0].items():
        assert torch.equal(models[1][name], tensor), name
    journals = [
        [(step.samples, step.loss, step.metric) for step in RunFolder(here / name).steps()]
        for name in ("whole", "killed")
    ]
    assert journals[0] == journals[1]
