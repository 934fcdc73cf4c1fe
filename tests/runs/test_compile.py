"""Compiled models: the same results up to rounding, saved under plain names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.core.errors import UsageError
from manyhands.records.record import RunRecord

USUAL: dict[str, Any] = {"batch": 200, "epochs": 1, "threads": 1, "quiet": True, "dtype": "float64"}
WAYS: dict[str, dict[str, Any]] = {
    "allreduce": {"strategy": "allreduce", "workers": 2},
    "single": {},
    "pipeline": {"strategy": "pipeline", "workers": 2, "micro_batches": 2},
    "sharded": {"strategy": "sharded", "workers": 2},
    "average": {"strategy": "average", "workers": 2, "every": 1},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return mh.train("digits-mlp", out=tmp_path_factory.mktemp("plain") / "run", **USUAL)


@pytest.mark.parametrize(
    "way", [way if way == "allreduce" else pytest.param(way, marks=pytest.mark.soak) for way in WAYS]
)
def test_a_compiled_model_is_the_same_model(plain: RunRecord, way: str, tmp_path: Path) -> None:
    """An epoch has a short last batch, for which it is compiled again, and an evaluation."""
    settings: dict[str, Any] = {"compile": True, **USUAL, **WAYS[way]}
    if way == "average":
        settings["recipe"] = plain.spec.recipe
    record = mh.train("digits-mlp", out=tmp_path / "run", **settings)
    ours, theirs = record.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-9)
    assert record.metric == plain.metric
    record.model()  # loads it into the plain model
    part = mh.train("digits-mlp", out=tmp_path / "part", samples=600, **settings)
    assert part.samples == 600
    resumed = mh.train("digits-mlp", out=tmp_path / "part", resume=True, allow_changes=True, **settings)
    assert all(torch.equal(tensor, resumed.state_dict()[name]) for name, tensor in ours.items())


def test_a_compiler_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UsageError) as caught:
        mh.train("digits-mlp", compile=True, quiet=True)
    assert str(caught.value) == (
        "--compile needs a C++ compiler, and there is no no-such-compiler: install one, or leave it out"
    )
