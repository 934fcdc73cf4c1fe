"""mpirun: what the conformance suite does not test."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path

import pytest

from launchers.functions import speak, sum_by_mpi
from manyhands.core.errors import UsageError, WorkerFailedError
from manyhands.launchers import mpi
from manyhands.launchers.base import SupervisionOptions
from manyhands.launchers.control.server import ControlServer
from manyhands.launchers.mpi import MpiLauncher, MpiProcesses
from manyhands.launchers.processes.worker_main import VARIABLE
from manyhands.testing.worker_functions import add_rank


@pytest.fixture
def fake_mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a program that is found as mpirun."""
    path = tmp_path / "mpirun"
    monkeypatch.setattr(mpi, "find_mpirun", lambda: str(path))
    return path


def test_without_mpirun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mpi.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"^launcher mpi needs mpirun: pip install 'manyhands\[mpi\]'$"):
        MpiLauncher()


def test_the_output_of_an_mpirun_that_cannot_start_is_shown(fake_mpirun: Path) -> None:
    fake_mpirun.write_text("#!/bin/sh\necho 'not enough slots' >&2\nexit 213\n")
    fake_mpirun.chmod(0o755)
    sentence = r"^mpirun exited with code 213 before its workers started\n  not enough slots$"
    with pytest.raises(WorkerFailedError, match=sentence):
        MpiLauncher().launch(add_rank, 2, 1)
    with MpiLauncher().executor(2) as executor, pytest.raises(WorkerFailedError, match=sentence):
        executor.submit(abs, 1).result(30)


def test_the_key_is_on_no_command_line(fake_mpirun: Path, tmp_path: Path) -> None:
    fake_mpirun.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/line\nenv > {tmp_path}/environment\nexit 1\n')
    fake_mpirun.chmod(0o755)
    with pytest.raises(WorkerFailedError):
        MpiLauncher().launch(add_rank, 2, 1)
    variables = dict(
        line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines() if "=" in line
    )
    settings = json.loads(variables[VARIABLE])
    assert len(bytes.fromhex(settings["key"])) == 32
    assert settings["key"] not in (tmp_path / "line").read_text()
    if os.geteuid() == 0:
        assert variables["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"


def test_ranks_can_use_mpi_and_its_output_is_in_the_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On hosts by name, by TCP; and all output is in the logs."""
    monkeypatch.setenv("MANYHANDS_HOSTS", "localhost:2")
    before = set(Path("/dev/shm").iterdir())
    assert MpiLauncher().launch(sum_by_mpi, 2, supervision=SupervisionOptions(logs=tmp_path)) == [3, 3]
    assert set(Path("/dev/shm").iterdir()) == before
    assert (tmp_path / "mpirun.log").read_text() == ""
    MpiLauncher().launch(speak, 2, supervision=SupervisionOptions(logs=tmp_path))
    assert "rank 1, grüezi" in (tmp_path / "rank-1.log").read_text()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("replaced", [False, True])
def test_it_stops_listening_once_all_are_connected(replaced: bool) -> None:
    """Unless lost workers may be replaced."""
    with ControlServer() as server:
        processes = MpiProcesses("mpirun", server, None, continuous=replaced)
        processes.all_connected()
        with socket.socket(socket.AF_UNIX) as other:
            error = other.connect_ex("\0" + processes._address[1:])
        assert error == (0 if replaced else errno.ECONNREFUSED)
