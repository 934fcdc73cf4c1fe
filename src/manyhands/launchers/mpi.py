"""Workers as the ranks of an mpirun that this process starts, on this machine or on several.

mpirun is here a way to start processes where MPI is at home: they link up with this one as forked ones do.
`MANYHANDS_HOSTS=a:2,b:2` is what mpirun calls `--host`; without it the workers are on this machine.
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
from manyhands.core.errors import UsageError, WorkerFailedError
from manyhands.launchers.base import PLAIN, Supervision
from manyhands.launchers.control.remote_calls import check_workers
from manyhands.launchers.control.server import ControlServer, new_key
from manyhands.launchers.processes.executor import WorkerExecutor
from manyhands.launchers.processes.local_processes import is_stopped
from manyhands.launchers.processes.worker_main import VARIABLE, log_of
from manyhands.launchers.supervision import launch
from manyhands.launchers.supervision.diagnosis import Ending, WorkerState

HOSTS = "MANYHANDS_HOSTS"
TERM = 5.0  # seconds mpirun has to end its ranks and clean up after them before it is killed


@final
class MpiLauncher:
    """A rank of mpirun a worker."""

    leads = True

    def __init__(self) -> None:
        """Find mpirun, or say where it comes from."""
        self._mpirun = find_mpirun()

    def warm_up(self) -> None:
        """Every rank imports for itself."""

    def launch(
        self, function: Callable[..., Any], workers: int, *arguments: Any, supervision: Supervision = PLAIN
    ) -> list[Any]:
        """Run the function once a rank and return what each of them returned, by rank."""

        def crew(hub: ControlServer, logs: Path | None) -> MpiProcesses:
            return MpiProcesses(self._mpirun, hub, logs, continuous=bool(supervision.spare))

        return launch.launch("mpi", crew, function, workers, arguments, supervision)

    def executor(self, workers: int) -> Executor:
        """The ranks of one mpirun, which goes on when one of them crashes."""
        check_workers("mpi", workers)
        return WorkerExecutor(workers, lambda hub: MpiProcesses(self._mpirun, hub, None, continuous=True))


def find_mpirun() -> str:
    """The one beside this Python, which the wheel installs, or else the first in PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun")
    if found is None:
        raise UsageError("launcher mpi needs mpirun: pip install 'manyhands[mpi]'")
    return found


def door(hosts: str) -> str | None:
    """Where ranks on these hosts find this process: at one address that leads to them, if it must be TCP."""
    names = [part.partition(":")[0].strip() for part in hosts.split(",")]
    others = [name for name in names if name and name != socket.gethostname() and not is_loopback(name)]
    for other in others:
        with contextlib.suppress(OSError):
            return f"{source(other)}:0"
    if others:
        raise UsageError(
            f"{HOSTS}={hosts}: no way leads from this host to {', '.join(others)}; write their addresses"
        )
    return None


@final
class MpiProcesses:
    """One mpirun for a gang; for a pool, one more for each worker that was lost."""

    certain = False  # mpirun tells of the first death, and only when it has ended itself
    restarts = False
    together = True
    replaces = True

    def __init__(self, mpirun: str, hub: ControlServer, logs: Path | None, continuous: bool = False) -> None:
        """`continuous`: mpirun, and with it the others, goes on when one of them dies."""
        self._mpirun, self._hub, self._logs, self.severs = mpirun, hub, logs, continuous
        self._key = new_key()
        self._hosts = os.environ.get(HOSTS)
        place = door(self._hosts or "")
        self._address = hub.listen(self._key, place)
        # On one host MPI needs no TCP, and would listen for it on every interface; who asks for it gets it.
        self._defaults = {"OMPI_MCA_btl": "^tcp"} if place is None else {}
        self._processes: list[_Mpirun] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill_all()
        self.close()

    def start(self, ranks: Sequence[int], title: str) -> None:
        """Start an mpirun with a rank for each of these, which follow one another."""
        told = {
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
        command += ["--continuous"] if self.severs else []
        for variable in (VARIABLE, "PYTHONPATH"):  # by name only: anyone can read a command line
            command += ["-x", variable]
        command += [sys.executable, "-P", "-m", "manyhands.launchers.processes.worker_main"]
        environ = {
            **self._defaults,
            **os.environ,
            VARIABLE: json.dumps(told),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        self._processes.append(_Mpirun(command, for_mpirun(environ), self._logs, ranks))

    def assembled(self) -> None:
        """Nobody else may come, unless some of them are replaced."""
        if not self.severs:
            self._hub.close_door()

    def ended(self) -> dict[int, Ending]:
        """What mpirun said about the first that died; that it could not begin is an error of its own."""
        found: dict[int, Ending] = {}
        for process in self._processes:
            if process.has_ended():
                found.update(process.told())
                if not any(rank in self._hub.who for rank in process.ranks):
                    raise WorkerFailedError(process.why_not())
        return found

    def is_gone(self, rank: int, unlinked: bool) -> bool:
        """When its mpirun has ended."""
        return all(process.has_ended() for process in self._processes if rank in process.ranks)

    def is_stopped(self, rank: int) -> bool:
        """Where it is on this host."""
        host, pid = self._hub.who.get(rank, ("", 0))
        return host == socket.gethostname() and is_stopped(pid)

    def sever(self, rank: int) -> None:
        """One that is on this host at once; another obeys, or leaves when it finds its line closed."""
        if not self._kill_here(rank):
            self._hub.send(rank, "abort", 1)

    def kill(self, rank: int) -> None:
        """One that is on this host at once; mpirun ends the others with it, wherever they are."""
        self._kill_here(rank)
        for process in self._processes:
            if rank in process.ranks:
                process.terminate()

    def kill_all(self) -> None:
        """All ranks, and mpirun."""
        for process in self._processes:
            if not process.has_ended():
                for rank in process.ranks:
                    self.kill(rank)
        until = time.monotonic() + TERM
        for process in self._processes:
            process.end(max(0.1, until - time.monotonic()))

    def known(self, rank: int) -> WorkerState:
        """What is known before it says hello."""
        return WorkerState(rank, log=log_of(self._logs, rank))

    def close(self) -> None:
        """Nobody else may come."""
        self._hub.close_door()

    def _kill_here(self, rank: int) -> bool:
        host, pid = self._hub.who.get(rank, ("", 0))
        if rank not in self._hub.ranks or host != socket.gethostname():
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
        return True


@final
class _Mpirun:
    """One mpirun and what it writes, which is kept for what it says about deaths."""

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
        """Whether it has, and with it its ranks."""
        return self._process.poll() is not None

    def told(self) -> dict[int, Ending]:
        """The first rank that died, as mpirun tells it."""
        text = self._read()
        if match := re.search(r"process rank (\d+) with PID.*?exited\s+on\s+signal (\d+)", text, re.DOTALL):
            return {self.ranks[0] + int(match[1]): Ending("signal", int(match[2]))}
        if match := re.search(r"Process name:\s+\[[^,]*,\s*(\d+)\]\s+Exit code:\s+(\d+)", text):
            return {self.ranks[0] + int(match[1]): Ending("exit", int(match[2]))}
        return {}

    def why_not(self) -> str:
        """A sentence about an mpirun that ended before any rank linked up."""
        lines = [line for line in self._read().splitlines() if line.strip(" -")]
        said = "".join(f"\n  {line}" for line in lines[-12:])
        return f"mpirun ended with exit code {self._process.returncode} before its workers began" + said

    def terminate(self) -> None:
        """Ask it to end its ranks and itself."""
        if not self.has_ended():
            self._process.terminate()

    def end(self, seconds: float) -> None:
        """Wait for its end, and kill it when it takes longer."""
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
    """What Open MPI must be told: that root may, in a container; not to complain about a network it lacks."""
    # Started from inside another mpirun or Slurm step, it would think that it is one of its ranks.
    ours = {key: value for key, value in environ.items() if not re.match(r"PMIX_|PMI_|OMPI_COMM_|PRTE_", key)}
    if os.geteuid() == 0:
        ours |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {"OMPI_MCA_osc": "^ucx", **ours}
