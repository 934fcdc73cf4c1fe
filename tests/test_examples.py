"""The examples run, and stay short."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("residual.py:residual", ""),
        ("gpt.py:gpt", ""),
        ("regression.py:diabetes", ""),
        ("bert.py:bert", "transformers"),
        ("keras_digits.py:digits", "keras"),
    ],
)
def test_what_people_bring_reaches_its_target(name: str, needs: str, typed: Callable[..., Answer]) -> None:
    if needs and not importlib.util.find_spec(needs):
        pytest.skip(f"{needs} is not installed")
    file = ROOT / "examples" / name
    answer = typed("train", str(file), "--json", "--quiet", "--threads", "1", "--stop-at-target")
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["status"] == "target"


def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells run in order, in one process."""
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "examples/notebook.ipynb").read_text())["cells"]
    space: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        assert cell.get("outputs", []) == []
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "<cell>", "exec"), space)  # noqa: S102
    assert space["run"].metric > 0.85
