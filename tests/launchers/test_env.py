"""Workers that another program started: by hand with torchrun's variables, and by a real mpirun."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from manyhands.core.errors import UsageError
from manyhands.launchers.env.launcher import EnvLauncher
from manyhands.launchers.mpi import find_mpirun, for_mpirun

SCRIPT = Path(__file__).with_name("env_script.py")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Outcome:
    """Output and exit codes by rank."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        answers = [process.communicate(timeout=60) for process in processes]
        self.out, self.err = [out for out, _ in answers], [err for _, err in answers]
        self.codes = [process.returncode for process in processes]

    def values(self) -> list[Any]:
        assert self.codes == [0] * len(self.codes), self.err
        return [json.loads(out) for out in self.out]


def start(what: str, size: int, port: int | None = None, ranks: Sequence[int] | None = None) -> Outcome:
    """Start ranks as torchrun does, without the second that importing torch takes."""
    port = port or free_port()
    processes = []
    for rank in range(size) if ranks is None else ranks:
        given = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        # the port of the control server is one above MASTER_PORT
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port - 1}
        environ = {**os.environ, **{name: str(value) for name, value in (given | master).items()}}
        command = [sys.executable, str(SCRIPT), what, str(size)]
        processes.append(
            subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    return Outcome(processes)


@pytest.mark.parametrize("size", [1, 3])
def test_every_rank_gets_all_results_of_the_leaders_call(size: int) -> None:
    expected = [["mine", rank, 40] for rank in range(size)]
    exchanged = [[50_000 * k + rank for rank in range(size)] for k in range(2)]
    for rank, value in enumerate(start("results", size).values()):
        assert value["leads"] == (rank == 0)
        assert value["first"] == expected
        assert value["second"] == [exchanged] * size
        assert value["messages"] == (100 * size if rank == 0 else 0)


def test_followers_run_the_calls_of_the_leaders_executor() -> None:
    for rank, value in enumerate(start("executor", 3).values()):
        assert value["squares"] == ([0, 1, 4, 9, 16, 25] if rank == 0 else [])
        assert value["then"] == [[0, 3, 1], [1, 3, 2], [2, 3, 3]]


def test_a_worker_that_dies_is_named_by_the_leader_alone() -> None:
    done = start("SIGKILL", 3)
    assert done.codes == [1, 1, -signal.SIGKILL]
    assert re.fullmatch(
        r"WorkerFailedError: worker 2 of 3 \(host \S+, pid \d+\) was lost \(its connection closed: killed, "
        r"crashed or exited\) at step 1,204, in backward\n"
        r"workers 0, 1 were waiting in barrier 2,408; they were stopped after .*\n",
        done.err[0],
    )
    assert done.err[1] == ""


def test_a_worker_that_raises_is_named_by_the_leader_alone() -> None:
    done = start("fail", 2)
    assert done.codes == [1, 1]
    assert "worker 1 of 2" in done.err[0]
    assert "raised ValueError: rank 1 fails on purpose" in done.err[0]
    assert "in fail\n" in done.err[0]
    assert done.err[1] == ""


def test_our_own_errors_give_all_ranks_the_same_exit_code() -> None:
    done = start("misuse", 2)
    assert done.codes == [2, 2]
    assert done.err == ["UsageError: there is no task of that name\n", ""]


def test_a_hang_ends_all() -> None:
    done = start("hang", 2)
    assert done.codes == [1, 1]
    assert re.search(r"worker 1 of 2 \(.*\) has been hanging for \S+ s at step 5, in data", done.err[0])
    assert done.err[1] == ""


@pytest.mark.parametrize(
    ("how", "happened"),
    [("raise", "raised ValueError: rank 2 fails on purpose"), ("SIGKILL", r"was lost \(.*\)")],
)
def test_an_expendable_worker_may_be_lost(how: str, happened: str) -> None:
    """If the starter allows it; a worker that raised stays until the end and gets the results, too."""
    done = start(f"lose {how}", 3)
    assert done.codes == [0, 0, -signal.SIGKILL if how == "SIGKILL" else 0]
    values = [json.loads(out) for out in done.out if out]
    assert [one["during"] for one in values] == [[[0, 1, None], [0, 1, None], None]] * len(values)
    assert len(values) == 3 - (how == "SIGKILL")
    (sentence,) = values[0]["lost"]
    assert re.fullmatch(
        rf"worker 2 of 3 \(host \S+, pid \d+\) {happened} at step 120, in backward; the others continue",
        sentence,
    )


def test_when_the_leader_dies_rank_1_prints_the_message() -> None:
    done = start("leader", 3)
    assert done.codes == [-signal.SIGKILL, 1, 1]
    assert re.fullmatch(
        r"error: worker 0 of 3 \(host \S+, pid \d+\) was lost "
        r"\(its connection closed: killed, crashed or exited\)\n",
        done.err[1],
    )
    assert done.err[2] == ""


def test_workers_that_never_connect(tmp_path: Path) -> None:
    port = free_port()
    environ = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MANYHANDS_PORT": str(port)}
    code = "from manyhands.launchers.env.launcher import EnvLauncher as E; E(timeout=0.3).launch(print, 3)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environ, "TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    file = tmp_path / f"manyhands-{os.getuid()}" / f"manyhands-__127.0.0.1_{port}.json"
    assert done.stderr.splitlines()[-1].endswith(
        f"workers 1, 2 of 3 did not start within 0.3 s; they look for {file}"
    )
    assert list(tmp_path.iterdir()) == []


def test_the_number_of_workers_is_the_starters(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=r"^launcher env needs a process that torchrun \(RANK, .*is not one"):
        EnvLauncher()
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MANYHANDS_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"^torchrun started 2 workers, not 4$"):
        EnvLauncher().launch(print, 4)


@pytest.mark.parametrize("what", ["results", "SIGKILL", "fail"])
def test_under_mpirun(what: str, tmp_path: Path) -> None:
    """It kills all ranks a quarter second after one has died: the leader must have printed its message."""
    command = [find_mpirun(), "-n", "2", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    environ = for_mpirun({**os.environ, "TMPDIR": str(tmp_path)})
    before = set(Path(tempfile.gettempdir()).glob("manyhands-*"))
    started = time.monotonic()
    done = subprocess.run(
        [*command, sys.executable, str(SCRIPT), what, "2"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert time.monotonic() - started < 30
    if what == "results":
        values = [json.loads(line) for line in done.stdout.splitlines()]
        assert [value["first"] for value in values] == [[["mine", 0, 40], ["mine", 1, 40]]] * 2
    else:
        assert done.returncode != 0
        assert "WorkerFailedError: worker 1 of 2" in done.stderr
        assert ("was lost" if what == "SIGKILL" else "raised ValueError") in done.stderr
    assert not list(tmp_path.glob("manyhands-*"))
    assert set(Path(tempfile.gettempdir()).glob("manyhands-*")) <= before


def test_under_an_mpirun_that_does_not_give_the_local_size() -> None:
    """Then MPI broadcasts address and key, and all ranks turn out to be here: nothing listens for others."""
    command = [find_mpirun(), "-n", "2", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    without_it = ["env", "-u", "OMPI_COMM_WORLD_LOCAL_SIZE", sys.executable, str(SCRIPT), "results", "2"]
    done = subprocess.run(
        [*command, *without_it],
        env=for_mpirun(dict(os.environ)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    values = [json.loads(line) for line in done.stdout.splitlines()]
    assert [value["first"] for value in values] == [[["mine", 0, 40], ["mine", 1, 40]]] * 2, done.stderr
