"""Several workers need Linux; reading results and training with one worker do not."""

from __future__ import annotations

import errno
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from conftest import called
from manyhands.core import file_locks
from manyhands.core.errors import StorageError, UsageError
from manyhands.records.run_folder import RunFolder
from manyhands.records.study_results import StudyFolder
from manyhands.runs.checks import check_system

ELSEWHERE = Path(__file__).with_name("other_system.py")
NEEDS_LINUX = (
    "error: launcher local needs Linux: Python on this system (win32) has no os.waitid; one worker trains "
    "here, without --workers"
)


def test_without_what_windows_lacks(tmp_path: Path) -> None:
    """It was not even possible to list tasks: `import fcntl` stood at the top."""
    lines = (
        "list tasks",
        "train digits-mlp --epochs 1 --threads 1 --out runs/run",
        "show runs/run",
        "report runs",
        "train --resume runs/run",
        "train quadratic --workers 2",
    )
    # and a code page that has none of our bars and dots
    answer = called([sys.executable, ELSEWHERE, "win32", *lines], tmp_path, PYTHONIOENCODING="ascii")
    codes = [line for line in answer.out.splitlines() if line.startswith("exit ")]
    assert codes == ["exit 0"] * 5 + ["exit 2"], answer.err
    assert "digits-mlp         small network on" in answer.out
    assert "memory     not known on this system" in answer.out
    assert (tmp_path / "runs/report.html").is_file()
    assert "runs/run is already finished" in answer.err.replace("\\", "/")
    assert answer.err.splitlines()[-1] == NEEDS_LINUX


def test_without_what_macos_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python has no os.waitid before 3.13: a launcher that needs it says so before anything starts."""
    monkeypatch.delattr(os, "waitid")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(
        UsageError, match=r"^launcher local needs Linux: .* \(darwin\) has no os\.waitid; one"
    ):
        check_system("local")
    for launcher in ("inline", "env", "mpi"):
        check_system(launcher)


# ---------------------------------------------------------------------- locks
def opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT)


def held_by_one(path: Path) -> None:
    """As processes would: descriptors that were opened by themselves lock each other out."""
    first, second = opened(path), opened(path)
    assert file_locks.take(first)
    assert not file_locks.take(second)
    waited = threading.Thread(target=file_locks.take, args=(second,), kwargs={"wait": True}, daemon=True)
    waited.start()
    waited.join(0.05)
    assert waited.is_alive()
    os.close(first)
    waited.join(5.0)
    assert not waited.is_alive()
    os.close(second)


def test_a_lock_has_one_holder(tmp_path: Path) -> None:
    held_by_one(tmp_path / "lock")


class Msvcrt:
    """As Windows has it: a byte of a file is one process's, who keeps others even from reading it."""

    LK_NBLCK = 2

    def __init__(self) -> None:
        self.at: dict[int, int] = {}

    def locking(self, descriptor: int, mode: int, count: int) -> None:
        assert (mode, count) == (self.LK_NBLCK, 1)
        for other in list(self.at):
            try:
                os.fstat(other)
            except OSError:
                del self.at[other]
        if self.at.keys() - {descriptor}:
            raise PermissionError(errno.EACCES, "Permission denied")
        self.at[descriptor] = os.lseek(descriptor, 0, os.SEEK_CUR)


def test_a_lock_of_windows_has_one_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = Msvcrt()
    monkeypatch.setattr(file_locks, "_fcntl", None)
    monkeypatch.setattr(file_locks, "_msvcrt", windows)
    held_by_one(tmp_path / "lock")
    assert set(windows.at.values()) <= {file_locks.BYTE}
    with RunFolder(tmp_path).locked():
        assert list(windows.at.values()) == [file_locks.BYTE]  # not one that says who has it
        assert (tmp_path / ".lock").read_text() == str(os.getpid())


def test_without_locks_every_process_is_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_locks, "_fcntl", None)
    monkeypatch.setattr(file_locks, "_msvcrt", None)
    with RunFolder(tmp_path).locked(), RunFolder(tmp_path).locked():
        assert (tmp_path / ".lock").read_text() == str(os.getpid())


def test_a_second_process_is_told_who_has_the_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with (
        folder.locked(),
        pytest.raises(UsageError, match=rf"is being trained by another process \(pid {os.getpid()}\)$"),
        folder.locked(),
    ):
        pass
    with folder.locked():  # and has it when the first one is done
        pass


# ---------------------------------------------------------------------- links where a lock should be
@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_a_lock_that_is_no_file_is_refused(tmp_path: Path, what: str) -> None:
    """A stranger's run folder with `.lock -> FILE` once emptied FILE and wrote a number into it."""
    precious, lock = tmp_path / "precious", tmp_path / "run/.lock"
    precious.write_text("years of work")
    lock.parent.mkdir()
    {"link": lambda: lock.symlink_to(precious), "pipe": lambda: os.mkfifo(lock), "folder": lock.mkdir}[what]()
    with pytest.raises(StorageError) as caught, RunFolder(lock.parent).locked():
        pass
    reason = {
        "link": "it is a link, not a file",
        "pipe": "it is not a regular file",
        "folder": "is a directory",
    }
    assert str(caught.value) == f"cannot write {lock}: {reason[what]}"
    assert precious.read_text() == "years of work"


def test_a_study_does_not_write_through_a_link(tmp_path: Path) -> None:
    precious, journal = tmp_path / "precious", tmp_path / "study/journal.jsonl"
    precious.write_text("years of work")
    journal.parent.mkdir()
    journal.symlink_to(precious)
    folder: Any = StudyFolder(journal.parent)
    with pytest.raises(StorageError, match=r"it is a link, not a file$"), folder.writing():
        pass
    assert precious.read_text() == "years of work"
