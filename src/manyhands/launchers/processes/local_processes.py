"""Worker processes of this machine, as the process that they work for sees them: the nursery's other side."""

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

from manyhands.core.errors import WorkerFailedError
from manyhands.core.formatting import plural
from manyhands.launchers.control.connection import Connection
from manyhands.launchers.control.server import ControlServer
from manyhands.launchers.processes.fork_server import ChildSettings, ForkRequest, send
from manyhands.launchers.processes.worker_main import log_of
from manyhands.launchers.supervision.diagnosis import Ending, WorkerState, ended, ending_of

# A fork copies one thread, so the nursery must have no other; numerical libraries start theirs at import.
# Workers are free: OpenMP, which torch uses, starts its threads when it needs them.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
START = 300.0  # seconds it may take to import what workers need
REAP = 5.0


@final
class ForkServerProcess:
    """A running nursery; `nursery` makes it when there is none."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair()
        path = os.pathsep.join(sys.path)  # -P and this: what is imported there is what is imported here
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

    def channel(self) -> socket.socket:
        """A private channel for one crew; OSError when the nursery is gone."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"!"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours

    def how_it_ended(self) -> Ending | None:
        """Its exit, if it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1.0)
            return Ending("signal", -code) if code < 0 else Ending("exit", code)
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


_nurseries: dict[tuple[str, ...], ForkServerProcess] = {}
_making = threading.Lock()
_over = False


def fork_server(modules: tuple[str, ...]) -> ForkServerProcess:
    """The nursery of this process with these modules: kept for later launches, replaced when it has died."""
    with _making:
        if _over:
            raise WorkerFailedError("this process is ending: it starts no more workers")
        found = _nurseries.get(modules)
        if found is None or found.owner != os.getpid() or not found.is_alive():
            if found is not None:
                found.close()
            found = _nurseries[modules] = ForkServerProcess(modules)
        return found


def close_fork_server(modules: tuple[str, ...]) -> None:
    """End the nursery with these modules, if there is one; the next launch makes another."""
    with _making:
        found = _nurseries.pop(modules, None)
    if found is not None:
        found.close()


@atexit.register
def close_fork_servers() -> None:
    """At the end of this process no child is left."""
    global _over  # noqa: PLW0603 (a pool that was not shut down must not begin again)
    with _making:
        _over = True
    while _nurseries:
        _nurseries.popitem()[1].close()


@final
class LocalProcesses:
    """The processes of one gang or one pool; those of a pool come one by one."""

    certain = severs = restarts = True
    together = False  # a fork is quick
    replaces = True

    def __init__(
        self,
        hub: ControlServer,
        modules: tuple[str, ...],
        hosts: Sequence[str] | None = None,
        logs: Path | None = None,
    ) -> None:
        self._hub = hub
        self._hosts, self._logs = hosts, logs
        self._nursery = fork_server(modules)
        self._pids: dict[int, int] = {}
        self._endings: dict[int, Ending] = {}
        self._channel = self._nursery.channel()
        self._wire = Connection(self._channel)
        hub.watch(self._wire)
        self._order("surroundings", ChildSettings.of_this_process())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.kill_all()
        self.close()

    def start(self, ranks: Sequence[int], title: str) -> None:
        """Fork these workers; each says hello when it is there. What was there before it has ended."""
        for rank in ranks:
            self._pids.pop(rank, None)
            self._endings.pop(rank, None)
            ours, theirs = socket.socketpair()
            with theirs:
                birth = ForkRequest(
                    rank, self._host(rank), f"worker {rank} {title}", log_of(self._logs, rank)
                )
                self._order("fork", birth, theirs.fileno())
            self._hub.adopt(ours)

    def assembled(self) -> None:
        """That is all."""

    def ended(self) -> dict[int, Ending]:
        """As the nursery told."""
        self._read()
        return self._endings

    def is_gone(self, rank: int, unlinked: bool) -> bool:
        """The nursery knows."""
        return rank in self._endings

    def is_stopped(self, rank: int) -> bool:
        """As the system says."""
        return is_stopped(self._pids.get(rank, 0))

    def sever(self, rank: int) -> None:
        """The others do not notice."""
        self.kill(rank)

    def kill(self, rank: int) -> None:
        """SIGKILL."""
        self._order("kill", rank)

    def kill_all(self) -> None:
        """Close our half of the channel: the nursery kills everybody, reports, and closes its half."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
        until = time.monotonic() + REAP
        with contextlib.suppress(EOFError, OSError, ValueError):
            while time.monotonic() < until:
                _wait(self._wire, 0.1)
                self._take()

    def known(self, rank: int) -> WorkerState:
        """What was asked for."""
        return WorkerState(rank, self._host(rank), self._pids.get(rank, 0), log=log_of(self._logs, rank))

    def close(self) -> None:
        """Nobody is left, or will be when the nursery sees this."""
        self._hub.unwatch(self._wire)
        self._wire.close()

    def _host(self, rank: int) -> str:
        return self._hosts[rank % len(self._hosts)] if self._hosts else socket.gethostname()

    def _order(self, order: str, content: object, *descriptors: int) -> None:
        # The nursery may still be importing, and the first orders be longer than the socket holds.
        self._channel.settimeout(START)
        try:
            send(self._channel, (order, content), *descriptors)
        except OSError:
            raise self._orphaned() from None
        finally:
            self._channel.setblocking(False)

    def _read(self) -> None:
        try:
            self._take()
        except EOFError:
            raise self._orphaned() from None

    def _orphaned(self) -> WorkerFailedError:
        ending = self._nursery.how_it_ended()
        how = ended(ending) if ending else "does not answer"
        left = len(set(self._pids) - set(self._endings))
        their = f"; its {plural(left, 'worker')} ended with it" if left else ""
        return WorkerFailedError(f"the process that starts workers (pid {self._nursery.pid}) {how}{their}")

    def _take(self) -> None:
        for kind, rank, number in self._wire.messages():
            if kind == "born":
                self._pids[rank] = number
            else:
                self._endings[rank] = ending_of(number)


def is_stopped(pid: int) -> bool:
    """Whether a process of this host is stopped, where the system says so in /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


def _wait(wire: Connection, seconds: float) -> None:
    poll = select.poll()
    poll.register(wire, select.POLLIN)
    poll.poll(1000 * seconds)
