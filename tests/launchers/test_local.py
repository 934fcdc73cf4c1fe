"""Processes of this machine: what the conformance suite does not test, and what must never be left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launchers.functions import (
    exhaust,
    is_imported,
    late_to_exchange,
    multiply,
    save_slowly,
    sleep_unwatched,
    speak,
    variable,
)
from manyhands.core.errors import InterruptedRunError, UsageError, WorkerFailedError
from manyhands.launchers.base import SupervisionOptions
from manyhands.launchers.local import LocalLauncher
from manyhands.launchers.processes import local_processes
from manyhands.launchers.supervision import worker_group
from manyhands.testing.launchers import processes_below
from manyhands.testing.worker_functions import add_rank, environment, leave, nap, until_stopped

LIGHT = ["manyhands.testing.worker_functions"]


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


def run(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=60, check=False, cwd=path.parent
    )


def eventually(condition: Callable[[], Any], seconds: float = 10) -> Any:
    until = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.02)
    return found


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    """multiprocessing would run it again in every worker."""
    path = script(
        tmp_path,
        """
        from manyhands.launchers.local import LocalLauncher
        from manyhands.testing.worker_functions import add_rank
        print("once")
        print(LocalLauncher(preload=["manyhands.testing.worker_functions"]).launch(add_rank, 2, 40))
        """,
    )
    done = run(path)
    assert done.stdout == "once\n[(0, 2, 40), (1, 2, 41)]\n", done.stderr
    assert done.stderr == ""


def test_workers_do_not_have_what_the_script_defines(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        from manyhands.launchers.local import LocalLauncher
        def mine(info): return 1
        try:
            LocalLauncher(preload=["manyhands.testing.worker_functions"]).launch(mine, 2)
        except Exception as error:
            print(type(error).__name__, error)
        """,
    )
    assert run(path).stdout == (
        "UsageError mine is defined in the script script.py, which worker processes do not run again: "
        "move it to a module that they can import\n"
    )


def test_what_cannot_be_pickled_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"^add_rank and its arguments cannot be sent to a worker process: "):
        LocalLauncher(preload=LIGHT).launch(add_rank, 1, threading.Lock())
    with pytest.raises(UsageError, match=r"^the local launcher runs 1 worker or more, not 0$"):
        LocalLauncher(preload=LIGHT).launch(add_rank, 0, 1)


def test_modules_next_to_the_script_are_found(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def double(info, x):\n    return 2 * x\n")
    path = script(
        tmp_path,
        """
        import beside
        from manyhands.launchers.local import LocalLauncher
        print(LocalLauncher(preload=["manyhands.testing.worker_functions"]).launch(beside.double, 2, 4))
        """,
    )
    done = run(path)
    assert done.stdout == "[8, 8]\n", done.stderr


def test_hosts_can_be_pretended() -> None:
    found = LocalLauncher(hosts=["a", "a", "b"], preload=LIGHT).launch(environment, 3)
    assert found[0]["hosts"] == ("a", "a", "b")
    assert [one["LOCAL_RANK"] for one in found] == ["0", "1", "0"]
    assert [one["LOCAL_WORLD_SIZE"] for one in found] == ["2", "2", "1"]


def test_the_environment_is_that_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    LocalLauncher(preload=LIGHT).launch(
        add_rank, 1, 0
    )  # the fork server runs, with the environment of its start
    monkeypatch.setenv("MANYHANDS_TEST", "now")
    assert LocalLauncher(preload=LIGHT).launch(variable, 2, "MANYHANDS_TEST") == ["now", "now"]
    assert LocalLauncher(preload=LIGHT).launch(variable, 1, "OPENBLAS_NUM_THREADS") == [
        os.environ.get("OPENBLAS_NUM_THREADS")
    ]


def test_logs_are_appended(tmp_path: Path) -> None:
    for _ in range(2):
        LocalLauncher(preload=LIGHT).launch(speak, 2, supervision=SupervisionOptions(logs=tmp_path / "logs"))
    lines = (tmp_path / "logs" / "rank-1.log").read_text().splitlines()
    assert [line for line in lines if not line.startswith("--- ")] == ["rank 1, grüezi", "from C"] * 2
    assert sum(line.startswith("--- ") and "worker 1 of 2, pid " in line for line in lines) == 2


def test_a_crash_in_native_code_leaves_its_traceback_in_the_log(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailedError, match=re.escape(f"its output is in {tmp_path / 'rank-1.log'}")):
        LocalLauncher(preload=LIGHT).launch(
            leave, 2, "SIGSEGV", supervision=SupervisionOptions(logs=tmp_path)
        )
    log = (tmp_path / "rank-1.log").read_text()
    assert "Fatal Python error: Segmentation fault" in log
    assert "in leave" in log


def test_running_out_of_memory_is_named() -> None:
    sentence = (
        r"^\S*functions.py:\d+ in exhaust: MemoryError\n"
        r"worker 0 of 1 \(.*\) raised this error \(out of memory\)\n"
    )
    with pytest.raises(WorkerFailedError, match=sentence):
        LocalLauncher(preload=LIGHT).launch(exhaust, 1)


def test_it_works_in_another_thread() -> None:
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.append(LocalLauncher(preload=LIGHT).launch(add_rank, 2, 1))
    )
    thread.start()
    thread.join(30)
    assert results == [[(0, 2, 1), (1, 2, 2)]]


def test_a_group_and_an_executor_at_a_time() -> None:
    with LocalLauncher(preload=LIGHT).executor(2) as executor:
        naps = [executor.submit(nap, 0.3) for _ in range(2)]
        assert LocalLauncher(preload=LIGHT).launch(add_rank, 2, 1) == [(0, 2, 1), (1, 2, 2)]
        assert len({future.result() for future in naps}) == 2


def test_workers_of_an_executor_are_reused() -> None:
    with LocalLauncher(preload=LIGHT).executor(2) as executor:
        assert len(set(executor.map(nap, [0.01] * 20))) <= 2


def test_exchange_is_a_wait() -> None:
    """In any phase: the worker that keeps the others waiting in it is to blame, not they."""
    with pytest.raises(WorkerFailedError) as caught:
        LocalLauncher(preload=LIGHT).launch(late_to_exchange, 2, supervision=SupervisionOptions(timeout=1))
    assert re.match(
        r"worker 1 of 2 \(.*\) has been hanging for \S+ s at step 0, in other\n", str(caught.value)
    )
    assert "worker 0 was waiting in exchange 1; it was stopped" in str(caught.value)


def test_without_a_status_there_is_no_hang() -> None:
    assert (
        len(
            LocalLauncher(preload=LIGHT).launch(
                sleep_unwatched, 1, supervision=SupervisionOptions(timeout=0.2)
            )
        )
        == 1
    )


def test_a_checkpoint_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is interrupted and done; rank 0 takes longer to write a checkpoint than other work may take."""
    monkeypatch.setattr(worker_group, "AFTER_OUR_ERROR", 0.2)
    messages: list[Any] = []
    with pytest.raises(InterruptedRunError, match="rank 0"):
        LocalLauncher(preload=LIGHT).launch(
            save_slowly, 2, supervision=SupervisionOptions(on_message=messages.append)
        )
    assert messages == ["saved"]


def test_a_fork_server_that_dies_ends_its_workers_and_is_replaced() -> None:
    pids: list[int] = []

    def on_message(message: Any) -> None:
        pids.append(message[2])
        if len(pids) == 2:
            os.kill(local_processes.fork_server(tuple(LIGHT)).pid, signal.SIGKILL)

    sentence = (
        r"^the process that starts workers \(pid \d+\) was killed by signal 9 "
        r"\(SIGKILL, often because memory ran out\); its 2 workers ended with it$"
    )
    with pytest.raises(WorkerFailedError, match=sentence):
        LocalLauncher(preload=LIGHT).launch(
            until_stopped, 2, False, supervision=SupervisionOptions(on_message=on_message)
        )
    assert eventually(lambda: not any(_runs(pid) for pid in pids))
    assert LocalLauncher(preload=LIGHT).launch(add_rank, 1, 1) == [(0, 1, 1)]


def test_an_executor_survives_its_fork_server() -> None:
    with LocalLauncher(preload=LIGHT).executor(1) as executor:
        first = executor.submit(nap, 60)
        assert eventually(first.running)
        os.kill(local_processes.fork_server(tuple(LIGHT)).pid, signal.SIGKILL)
        with pytest.raises(WorkerFailedError, match="the process that starts workers"):
            first.result(30)
        assert executor.submit(nap, 0).result(30) > 0


PARENT = """
    import os, sys, time
    from manyhands.launchers.base import SupervisionOptions
    from manyhands.launchers.{module} import {name}
    from manyhands.testing.worker_functions import until_stopped, nap
    if __name__ == "__main__":
        launcher = {name}({arguments})
        def on_message(message):
            print(message[2], flush=True)
        {last}
"""
LOCAL = {
    "module": "local",
    "name": "LocalLauncher",
    "arguments": "preload=['manyhands.testing.worker_functions']",
}
MPI = {"module": "mpi", "name": "MpiLauncher", "arguments": ""}


@pytest.mark.parametrize("launcher", [LOCAL, MPI], ids=["local", "mpi"])
def test_the_parents_death_leaves_no_process(tmp_path: Path, launcher: dict[str, str]) -> None:
    """SIGKILL: it cannot clean up."""
    last = "launcher.launch(until_stopped, 2, False, supervision=SupervisionOptions(on_message=on_message))"
    path = script(tmp_path, PARENT.format(**launcher, last=last))
    with subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        pids += processes_below(parent.pid)
        assert len(set(pids)) >= 3  # two workers, and the process that started them
        parent.kill()
    assert eventually(lambda: not any(_runs(pid) for pid in pids)), [pid for pid in pids if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_that_exits_does_not_wait_for_a_forgotten_executor(tmp_path: Path) -> None:
    last = """future = launcher.executor(1).submit(nap, 100)
        while not future.running():
            time.sleep(0.01)
        print("running")"""
    started = time.monotonic()
    done = run(script(tmp_path, PARENT.format(**LOCAL, last=last)))
    assert (done.stdout, done.stderr) == ("running\n", "")
    assert time.monotonic() - started < 30


def test_the_second_launch_finds_torch_imported() -> None:
    """With the real preload; and threads can be started after the fork."""
    while local_processes._fork_servers:
        local_processes._fork_servers.popitem()[1].close()
    times = []
    for _ in range(2):
        started = time.perf_counter()
        assert LocalLauncher().launch(is_imported, 2, "torch") == [True, True]
        times.append(time.perf_counter() - started)
    print(f"first launch {times[0]:.2f} s, second {times[1]:.3f} s")
    assert times[1] < times[0] / 2
    assert LocalLauncher().launch(multiply, 1, 2) == [(2, True)]
