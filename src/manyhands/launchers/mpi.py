"""Workers as the ranks of an mpirun that this process starts, on this machine or on several.

mpirun only starts the processes: they connect to the control server of this process, as forked workers do.
`MANYHANDS_HOSTS=a:2,b:2` is passed to mpirun as `--host`; without it the workers are on this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from manyhands.core.addresses import is_loopback, source
from manyhands.core.environment import READ_BY_TORCH
from manyhands.core.errors import UsageError, WorkerFailedError
from manyhands.launchers.base import DEFAULT_SUPERVISION, SupervisionOptions
from manyhands.launchers.control.handshake import new_key
from manyhands.launchers.control.remote_calls import check_workers
from manyhands.launchers.control.server import ControlServer
from manyhands.launchers.processes.executor import WorkerExecutor
from manyhands.launchers.processes.local_processes import is_stopped
from manyhands.launchers.processes.worker_main import VARIABLE
from manyhands.launchers.supervision.launch_group import launch_group
from manyhands.launchers.worker_logs import log_of
from manyhands.launchers.worker_state import ProcessExit, WorkerState

HOSTS = "MANYHANDS_HOSTS"
TERM = 5.0  # seconds for mpirun to end its ranks and clean up before it is killed


@final
class MpiLauncher:
    """One rank of mpirun per worker."""

    leads = True

    def __init__(self) -> None:
        """Find mpirun, or say how to install it."""
        self._mpirun = find_mpirun()

    def warm_up(self) -> None:
        """There is nothing to start: every rank imports for itself."""

    def launch(
        self,
        function: Callable[..., Any],
        workers: int,
        *arguments: Any,
        supervision: SupervisionOptions = DEFAULT_SUPERVISION,
    ) -> list[Any]:
        """Run the function once per rank and return the results by rank."""

        def processes(server: ControlServer, logs: Path | None) -> MpiProcesses:
            return MpiProcesses(self._mpirun, server, logs, continuous=bool(supervision.expendable))

        return launch_group("mpi", processes, function, workers, arguments, supervision)

    def executor(self, workers: int) -> Executor:
        """An executor on the ranks of one mpirun, which continues when one of them crashes."""
        check_workers("mpi", workers)
        return WorkerExecutor(
            workers, lambda server: MpiProcesses(self._mpirun, server, None, continuous=True)
        )


def find_mpirun() -> str:
    """The mpirun next to this Python, which the wheel installs, or else the first one in PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun")
    if found is None:
        raise UsageError("launcher mpi needs mpirun: pip install 'manyhands[mpi]'")
    return found


def listen_address(hosts: str) -> str | None:
    """The TCP address at which ranks on these hosts reach this process; None if all are on this host."""
    names = [part.partition(":")[0].strip() for part in hosts.split(",")]
    others = [name for name in names if name and name != socket.gethostname() and not is_loopback(name)]
    for other in others:
        with contextlib.suppress(OSError):
            return f"{source(other)}:0"
    if others:
        raise UsageError(
            f"{HOSTS}={hosts}: this host has no route to {', '.join(others)}; use their IP addresses"
        )
    return None


@final
class MpiProcesses:
    """One mpirun for a worker group; for an executor, one more for each worker that was lost."""

    reports_exits = False  # mpirun reports the first exit, and only when it has ended itself
    can_restart = False
    starts_all_at_once = True
    can_start_more = True

    def __init__(
        self, mpirun: str, server: ControlServer, logs: Path | None, continuous: bool = False
    ) -> None:
        """`continuous`: mpirun, and with it the other ranks, continues when one of them dies."""
        self._mpirun, self._server, self._logs, self.can_kill_alone = mpirun, server, logs, continuous
        self._key = new_key()
        self._hosts = os.environ.get(HOSTS)
        address = listen_address(self._hosts or "")
        self._address = server.listen(self._key, address)
        # On one host MPI needs no TCP, and would listen on every interface; a setting of the user wins.
        self._defaults = {"OMPI_MCA_btl": "^tcp"} if address is None else {}
        self._runs: list[_Mpirun] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill_all()
        self.close()

    def start(self, ranks: Sequence[int], title: str) -> None:
        """Start an mpirun with these ranks, which are consecutive."""
        settings = {
            "address": self._address,
            "key": self._key.hex(),
            "first": ranks[0],
            "title": title,
            "logs": str(self._logs) if self._logs else None,
            "argv": sys.argv,
            "pythonpath": os.environ.get("PYTHONPATH"),
        }
        command = [self._mpirun, "-n", str(len(ranks)), "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
        command += ["--host", self._hosts] if self._hosts else []
        command += ["--continuous"] if self.can_kill_alone else []
        read_by_torch = [name for name in READ_BY_TORCH if name in os.environ]
        # by name only: every user can read a command line
        for variable in (VARIABLE, "PYTHONPATH", *read_by_torch):
            command += ["-x", variable]
        command += [sys.executable, "-P", "-m", "manyhands.launchers.processes.worker_main"]
        environ = {
            **self._defaults,
            **os.environ,
            VARIABLE: json.dumps(settings),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        self._runs.append(_Mpirun(command, for_mpirun(environ), self._logs, ranks))

    def all_connected(self) -> None:
        """Stop listening, unless lost workers may be replaced."""
        if not self.can_kill_alone:
            self._server.stop_listening()

    def exits(self) -> dict[int, ProcessExit]:
        """The first exit, as mpirun reports it; WorkerFailedError if mpirun could not start its ranks."""
        found: dict[int, ProcessExit] = {}
        for run in self._runs:
            if run.has_ended():
                found.update(run.first_exit())
                if not any(rank in self._server.identities for rank in run.ranks):
                    raise WorkerFailedError(run.failed_start())
        return found

    def is_gone(self, rank: int, disconnected: bool) -> bool:
        """Whether its mpirun has ended."""
        return all(run.has_ended() for run in self._runs if rank in run.ranks)

    def is_stopped(self, rank: int) -> bool:
        """Whether it is on this host, and the system says that it is stopped."""
        host, pid = self._server.identities.get(rank, ("", 0))
        return host == socket.gethostname() and is_stopped(pid)

    def kill_alone(self, rank: int) -> None:
        """Kill it if it is on this host; elsewhere ask it to leave, or it ends when its connection closes."""
        if not self._kill_here(rank):
            self._server.send(rank, "abort", 1)

    def kill(self, rank: int) -> None:
        """Kill it if it is on this host; mpirun ends its other ranks, on all hosts."""
        self._kill_here(rank)
        for run in self._runs:
            if rank in run.ranks:
                run.terminate()

    def kill_all(self) -> None:
        """Kill all ranks, and end mpirun."""
        for run in self._runs:
            if not run.has_ended():
                for rank in run.ranks:
                    self.kill(rank)
        until = time.monotonic() + TERM
        for run in self._runs:
            run.end(max(0.1, until - time.monotonic()))

    def describe(self, rank: int) -> WorkerState:
        """What is known before it says hello."""
        return WorkerState(rank, log=log_of(self._logs, rank))

    def close(self) -> None:
        """Stop listening."""
        self._server.stop_listening()

    def _kill_here(self, rank: int) -> bool:
        host, pid = self._server.identities.get(rank, ("", 0))
        if rank not in self._server.connected or host != socket.gethostname():
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
        return True


@final
class _Mpirun:
    """One mpirun, and its output, which is read for what it reports about exits."""

    def __init__(
        self, command: list[str], environ: dict[str, str], logs: Path | None, ranks: Sequence[int]
    ) -> None:
        self.ranks = ranks
        if logs is None:
            self._output = tempfile.TemporaryFile("w+b")  # noqa: SIM115 (closed in `end`)
        else:
            logs.mkdir(parents=True, exist_ok=True)
            self._output = (logs / "mpirun.log").open("a+b")
        self._begin = self._output.seek(0, os.SEEK_END)
        self._text: str | None = None
        self._process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the terminal's Ctrl-C is for this process, which passes it on
        )

    def has_ended(self) -> bool:
        """Whether it has ended, and with it its ranks."""
        return self._process.poll() is not None

    def first_exit(self) -> dict[int, ProcessExit]:
        """The rank that died first, as mpirun reports it."""
        text = self._read()
        if match := re.search(r"process rank (\d+) with PID.*?exited\s+on\s+signal (\d+)", text, re.DOTALL):
            return {self.ranks[0] + int(match[1]): ProcessExit("signal", int(match[2]))}
        if match := re.search(r"Process name:\s+\[[^,]*,\s*(\d+)\]\s+Exit code:\s+(\d+)", text):
            return {self.ranks[0] + int(match[1]): ProcessExit("exit", int(match[2]))}
        return {}

    def failed_start(self) -> str:
        """The message about an mpirun that ended before any rank was connected."""
        lines = [line for line in self._read().splitlines() if line.strip(" -")]
        output = "".join(f"\n  {line}" for line in lines[-12:])
        return f"mpirun exited with code {self._process.returncode} before its workers started" + output

    def terminate(self) -> None:
        """Ask it to end its ranks and itself."""
        if not self.has_ended():
            self._process.terminate()

    def end(self, seconds: float) -> None:
        """Wait this long for its end, then kill it."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._read()
        self._output.close()

    def _read(self) -> str:
        if self._text is not None:
            return self._text
        text = os.pread(self._output.fileno(), 2**20, self._begin).decode(errors="replace")
        if self.has_ended():
            self._text = text
        return text


def for_mpirun(environ: dict[str, str]) -> dict[str, str]:
    """The environment that Open MPI needs: root is allowed, and a missing network is no reason to warn."""
    # Without these: started inside another mpirun or Slurm step, it would take itself for one of its ranks.
    ours = {key: value for key, value in environ.items() if not re.match(r"PMIX_|PMI_|OMPI_COMM_|PRTE_", key)}
    if os.geteuid() == 0:
        ours |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {"OMPI_MCA_osc": "^ucx", **ours}
