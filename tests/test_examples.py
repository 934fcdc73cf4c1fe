"""The examples run, and stay short."""

from __future__ import annotations

import json
from collections.abc import Callable

from conftest import ROOT, Answer


def test_a_task_of_ones_own(typed: Callable[..., Answer]) -> None:
    path = ROOT / "examples/spirals.py"
    assert len(path.read_text().splitlines()) < 40
    answer = typed("train", f"{path}:spirals", "--set", "turns=1.5", "--json", "--quiet", "--threads", "1")
    assert answer.code == 0, answer.err
    record = json.loads(answer.out)
    assert record["metric"] >= record["target"]
    assert record["spec"]["options"] == {"turns": 1.5}
    assert record["run"].startswith("runs/spirals-")
