"""Worker processes of this machine, as their parent sees them: the other side of the fork server."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, final

from manyhands.core.environment import READ_BY_TORCH
from manyhands.core.errors import WorkerFailedError
from manyhands.core.formatting import plural
from manyhands.launchers.control.connection import Connection
from manyhands.launchers.control.server import ControlServer
from manyhands.launchers.processes.fork_server import ChildSettings, ForkRequest, send
from manyhands.launchers.supervision.diagnosis import exited
from manyhands.launchers.worker_logs import log_of
from manyhands.launchers.worker_state import ProcessExit, WorkerState, exit_of

# A fork copies one thread, so the fork server must have no other; numerical libraries start some at import.
# Workers are not limited: OpenMP, which torch uses, starts its threads when it needs them.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
START = 300.0  # seconds to import what workers need
REAP = 5.0  # seconds for killed processes to end


@final
class ForkServerProcess:
    """A running fork server; `fork_server` starts it if there is none."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair()
        path = os.pathsep.join(sys.path)  # with -P: what is imported there is what is imported here
        command = [sys.executable, "-P", "-m", "manyhands.launchers.processes.fork_server"]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid()), *modules],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # the terminal's Ctrl-C is for this process, which passes it on
            )
        self.pid = self._process.pid
        self.owner = os.getpid()

    def is_alive(self) -> bool:
        """Whether it can still fork."""
        return self._process.poll() is None

    def open_session(self) -> socket.socket:
        """A private channel for one set of processes; OSError if the fork server is gone."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"!"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours

    def how_it_ended(self) -> ProcessExit | None:
        """Its exit, if it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1.0)
            return ProcessExit("signal", -code) if code < 0 else ProcessExit("exit", code)
        return None

    def close(self) -> None:
        """End it, and with it all its children."""
        self._control.close()
        if os.getpid() != self.owner:
            return
        try:
            self._process.wait(REAP)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_Key = tuple[tuple[str, ...], tuple[str | None, ...]]  # modules, and settings that are read with torch
_fork_servers: dict[_Key, ForkServerProcess] = {}
_lock = threading.Lock()
_exiting = False


def fork_server(modules: tuple[str, ...]) -> ForkServerProcess:
    """This process's fork server with these modules: kept for later launches, replaced if it has died."""
    with _lock:
        if _exiting:
            raise WorkerFailedError("this process is exiting and starts no more workers")
        key = modules, tuple(os.environ.get(name) for name in READ_BY_TORCH)
        found = _fork_servers.get(key)
        if found is None or found.owner != os.getpid() or not found.is_alive():
            if found is not None:
                found.close()
            found = _fork_servers[key] = ForkServerProcess(modules)
        return found


@atexit.register
def close_fork_servers() -> None:
    """At the exit of this process no child is left."""
    global _exiting  # noqa: PLW0603 (an executor that was not shut down must not start workers again)
    with _lock:
        _exiting = True
    while _fork_servers:
        _fork_servers.popitem()[1].close()


@final
class LocalProcesses:
    """The processes of one worker group or one executor; those of an executor are started one by one."""

    reports_exits = can_kill_alone = can_restart = True
    starts_all_at_once = False  # a fork is quick
    can_start_more = True

    def __init__(
        self,
        server: ControlServer,
        modules: tuple[str, ...],
        hosts: Sequence[str] | None = None,
        logs: Path | None = None,
    ) -> None:
        self._server = server
        self._hosts, self._logs = hosts, logs
        self._fork_server = fork_server(modules)
        self._pids: dict[int, int] = {}
        self._exits: dict[int, ProcessExit] = {}
        self._channel = self._fork_server.open_session()
        self._reports = Connection(self._channel)
        server.watch(self._reports)
        self._order("settings", ChildSettings.of_this_process())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.kill_all()
        self.close()

    def start(self, ranks: Sequence[int], title: str) -> None:
        """Fork these ranks; earlier processes of the same ranks have ended."""
        for rank in ranks:
            self._pids.pop(rank, None)
            self._exits.pop(rank, None)
            ours, theirs = socket.socketpair()
            log = log_of(self._logs, rank)
            with theirs:
                request = ForkRequest(rank, self._host(rank), f"worker {rank} {title}", log)
                self._order("fork", request, theirs.fileno())
            self._server.adopt(ours)

    def all_connected(self) -> None:
        """There is nothing to close: no other process can connect."""

    def exits(self) -> dict[int, ProcessExit]:
        """As the fork server reported them."""
        try:
            self._take_reports()
        except EOFError:
            raise self._fork_server_lost() from None
        return self._exits

    def is_gone(self, rank: int, disconnected: bool) -> bool:
        """Whether the fork server has reported its exit."""
        return rank in self._exits

    def is_stopped(self, rank: int) -> bool:
        """Whether the system says that it is stopped."""
        return is_stopped(self._pids.get(rank, 0))

    def kill_alone(self, rank: int) -> None:
        """Send SIGKILL; the others are not affected."""
        self.kill(rank)

    def kill(self, rank: int) -> None:
        """Send SIGKILL."""
        self._order("kill", rank)

    def kill_all(self) -> None:
        """Close our half of the channel: the fork server kills all children, reports, and closes its half."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
        until = time.monotonic() + REAP
        with contextlib.suppress(EOFError, OSError, ValueError):
            while time.monotonic() < until:
                _wait(self._reports, 0.1)
                self._take_reports()

    def describe(self, rank: int) -> WorkerState:
        """What it was started with, and its pid once that is known."""
        return WorkerState(rank, self._host(rank), self._pids.get(rank, 0), log=log_of(self._logs, rank))

    def close(self) -> None:
        """Close the session: the fork server kills the processes that are left."""
        self._server.unwatch(self._reports)
        self._reports.close()

    def _host(self, rank: int) -> str:
        return self._hosts[rank % len(self._hosts)] if self._hosts else socket.gethostname()

    def _order(self, order: str, content: object, *descriptors: int) -> None:
        # The fork server may still be importing, and the first orders may not fit into the socket's buffer.
        self._channel.settimeout(START)
        try:
            send(self._channel, (order, content), *descriptors)
        except OSError:
            raise self._fork_server_lost() from None
        finally:
            self._channel.setblocking(False)

    def _fork_server_lost(self) -> WorkerFailedError:
        how = self._fork_server.how_it_ended()
        happened = exited(how) if how else "does not respond"
        left = len(set(self._pids) - set(self._exits))
        workers = f"; its {plural(left, 'worker')} ended with it" if left else ""
        return WorkerFailedError(
            f"the process that starts workers (pid {self._fork_server.pid}) {happened}{workers}"
        )

    def _take_reports(self) -> None:
        for kind, rank, number in self._reports.messages():
            if kind == "started":
                self._pids[rank] = number
            else:
                self._exits[rank] = exit_of(number)


def is_stopped(pid: int) -> bool:
    """Whether a process of this host is stopped, if the system says so in /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


def _wait(connection: Connection, seconds: float) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.poll(1000 * seconds)
