"""Runs of the sharded strategy as a user starts them: what they learn, how they go on and how they end."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import manyhands as mh
from manyhands import cli
from manyhands.core.errors import UsageError, WorkerFailedError
from manyhands.engine.fault_injection import faults
from manyhands.records.record import RunRecord

SETTINGS: dict[str, Any] = {
    "batch": 65,  # uneven shares, and a ragged last batch
    "epochs": 1,
    "dtype": "float64",
    "accumulate": 2,
    "recipe_options": {"momentum": 0.9},
    "quiet": True,
}


def train(out: Path, **settings: Any) -> RunRecord:
    return mh.train("digits-mlp", out=out, **{**SETTINGS, **settings})


def difference(one: Path, other: Path) -> float:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - tensor).abs().max()) for name, tensor in theirs.items())


def test_a_run_goes_on_with_any_strategy_and_from_any(here: Path) -> None:
    reference = train(here / "reference", strategy="single")
    begun = train(here / "begun", strategy="sharded", workers=2, samples=65 * 8)
    for strategy, workers in (("sharded", 2), ("allreduce", 2), ("single", 1)):
        out = here / strategy
        shutil.copytree(here / "begun", out)
        found = train(out, strategy=strategy, workers=workers, resume=True, allow_changes=True)
        assert (found.samples, found.metric, found.resumed) == (reference.samples, reference.metric, 1)
        assert difference(out, here / "reference") < 1e-12
    train(here / "back", strategy="single", samples=65 * 8)
    train(here / "back", strategy="sharded", workers=3, resume=True, allow_changes=True)
    assert difference(here / "back", here / "reference") < 1e-12
    # digits-mlp in float64: 4,810 numbers, of which rank 0 has 32 of 64 and 5 of 10 rows
    half = 4810 * 8 // 2
    assert begun.choices["sharded"] == {"parameters": half, "gradients": half, "whole": 2 * half, "groups": 2}
    assert begun.traffic[0]["reduce_scatter"]["bytes"] > 0


def test_verify_finds_it_exact(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["digits-mlp", "--strategy", "sharded", "--workers", "2", "--steps", "3", "--json"]
    assert cli.answer(["verify", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["exact"], found["transport"]) == (True, "torch")
    float32, float64 = found["comparisons"]
    assert float32["largest"] < 1e-5
    assert float64["largest"] < 1e-12


def test_a_killed_worker_ends_the_run_by_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, "SIGKILL@1:8")
    with pytest.raises(WorkerFailedError) as caught:
        train(here / "run", strategy="sharded", workers=2, epochs=10_000)
    first, *rest = str(caught.value).splitlines()
    assert re.fullmatch(
        r"worker 1 of 2 \(host \S+, pid \d+\) was killed by signal 9 "
        r"\(SIGKILL, often because memory ran out\) at step 8, in all_gather \d+",
        first,
    )
    assert re.fullmatch(r"worker 0 was (waiting )?in \w+ [\d,]+.*; it was stopped after .*", rest[-2]), rest


def test_other_transports_are_refused(here: Path) -> None:
    with pytest.raises(UsageError, match=r"^strategy sharded is torch's fully_shard, .* use torch$"):
        train(here / "run", strategy="sharded", workers=2, transport="shm")
