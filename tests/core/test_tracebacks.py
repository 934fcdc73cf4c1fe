"""An error in a task's code: the user's own line first, the whole traceback in the run's folder."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import manyhands
from conftest import Answer
from manyhands.core.rank_info import RankStatus
from manyhands.launchers.control.remote_calls import pack, perform
from manyhands.launchers.supervision import diagnosis
from manyhands.launchers.worker_state import WorkerState
from manyhands.tasks import find

FAULTY = """import torch, manyhands as mh


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x[:, :3] if len(x) == 4 else x)


def task(model):
    data = mh.ArrayData(torch.zeros(8, 4), torch.zeros(8).long())
    loss = lambda outputs, targets: outputs.mean()
    return mh.Task(name="faulty", model=model, train=data, test=data, loss=loss, target=0.0)


def own() -> mh.Task:
    return task(Net)


def torchs() -> mh.Task:
    eights = torch.nn.Unflatten(0, (-1, 8)), torch.nn.Flatten(0, 1)
    return task(lambda: torch.nn.Sequential(*eights, torch.nn.Linear(4, 1)))


def early() -> mh.Task:
    torch.zeros(3).reshape(2)
"""
MAT = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x3 and 4x1)"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for what has no folder."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def test_the_users_line_comes_first_and_the_traceback_is_in_the_runs_folder(
    temporary: Path, typed: Callable[..., Answer]
) -> None:
    """It named torch's linear.py:134, and a file in the temporary folder."""
    answer = typed("train", "faulty.py:own", "-q", "--batch", "4", "--out", "run")
    assert answer.code == 1
    first, second, *_ = answer.err.splitlines()
    assert first == f"error: faulty.py:10 in forward: {MAT}"
    assert second == "       the whole traceback is in run/logs/rank-0.log"
    log = (temporary.parent / "run/logs/rank-0.log").read_text()
    assert log.startswith("--- ")
    assert "Traceback (most recent call last)" in log
    assert log.endswith(f"{MAT}\n")
    assert list(temporary.glob("*.log")) == []


def test_where_no_line_is_the_users_the_innermost_is_named(
    temporary: Path, typed: Callable[..., Answer]
) -> None:
    """A bug is never shown as a bare traceback, and never hidden either."""
    answer = typed("train", "faulty.py:torchs", "-q", "--batch", "4", "--out", "run")
    assert answer.code == 1
    first = answer.err.splitlines()[0]
    assert first.startswith("error: RuntimeError: unflatten: Provided sizes [-1, 8] ")
    assert first.endswith("; the whole traceback is in run/logs/rank-0.log)")


def test_an_error_before_there_is_a_folder(temporary: Path, typed: Callable[..., Answer]) -> None:
    answer = typed("train", "faulty.py:early", "-q")
    first, second = answer.err.splitlines()
    assert first == "error: faulty.py:29 in early: RuntimeError: shape '[2]' is invalid for input of size 3"
    (log,) = temporary.glob("*.log")
    assert second == f"       the whole traceback is in {log}"
    assert "Traceback (most recent call last)" in log.read_text()
    assert not (temporary.parent / "runs").exists()


def test_python_code_gets_the_error_itself(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(temporary.parent)
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2") as caught:
        manyhands.train("faulty.py:own", batch=4, quiet=True, out="run")
    assert caught.value.__notes__[0] == "the whole traceback is in run/logs/rank-0.log"


def call_forward(path: str) -> None:
    """What a worker's call comes down to."""
    task = find.build(path, {})
    task.model()(task.train.inputs[:4])


def test_several_workers_say_the_same_first(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(temporary.parent)
    failure = perform(pack(call_forward, ("faulty.py:own",)), None).failure
    assert failure is not None
    log = Path("run/logs/rank-1.log")
    everyone = [
        WorkerState(0, status=RankStatus(3, "forward")),
        WorkerState(1, failure=failure, failed_at=0.0, log=log),
    ]
    lines = diagnosis.failed(everyone[1], everyone, 0.1).splitlines()
    assert lines[0] == f"faulty.py:10 in forward: {MAT}"
    assert lines[1] == "worker 1 of 2 raised this error"
    assert lines[2] == "the whole traceback is in run/logs/rank-1.log"


def test_without_a_log_the_traceback_is_printed(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(temporary.parent)
    failure = perform(pack(call_forward, ("faulty.py:own",)), None).failure
    lines = diagnosis.failed(
        WorkerState(0, failure=failure, failed_at=0.0), [WorkerState(0)], 0.1
    ).splitlines()
    assert lines[:2] == [f"faulty.py:10 in forward: {MAT}", "worker 0 of 1 raised this error"]
    assert lines[2] == "  Traceback (most recent call last):"
