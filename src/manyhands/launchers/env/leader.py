"""Rank 0 of a job that another program started: it is a worker of the group, and supervises it in a thread.

rank 0   main thread: the function           own client ──┐
         a thread: supervises the group      server ◀─────┤
rank 1   main thread: the function           client ──────┤
rank 2   ...                                 client ──────┘
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from types import FrameType
from typing import final

from manyhands.core import addresses
from manyhands.core.errors import ManyhandsError, UsageError, WorkerFailedError
from manyhands.core.rank_info import RankInfo
from manyhands.launchers.base import SupervisionOptions
from manyhands.launchers.control.client import Call, ControlClient
from manyhands.launchers.control.connection import Connection
from manyhands.launchers.control.handshake import new_key
from manyhands.launchers.control.remote_calls import perform
from manyhands.launchers.control.server import ControlServer
from manyhands.launchers.env import rendezvous
from manyhands.launchers.env.follower import print_error
from manyhands.launchers.env.parent_watch import ParentWatch
from manyhands.launchers.env.rendezvous import ClusterEnvironment
from manyhands.launchers.processes.executor import WorkerExecutor
from manyhands.launchers.supervision.diagnosis import missing
from manyhands.launchers.supervision.worker_group import WorkerGroup
from manyhands.launchers.worker_state import ProcessExit, WorkerState

# All in seconds.
AFTER_SIGTERM = 1.0  # until rank 0 ends, if it has no message to print
MAIN_RETURNS = 1.5  # for rank 0's own call to end once the group has; native code may never return
MAIN_RETURNS_MPIRUN = 0.1  # the same under mpirun, which kills all workers soon after one has died
SEND_RESULTS = 60.0
_WAKE = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2  # used by no one else


class _AbortedError(KeyboardInterrupt):
    """Raised in the main thread when its group has ended; not an Exception: user code must not catch it."""


@final
class EnvLeader:
    """The control server of all ranks, its own among them, kept from launch to launch."""

    def __init__(self, cluster: ClusterEnvironment, watch: ParentWatch | None = None) -> None:
        self._cluster = cluster
        self._server = ControlServer()
        self._file: Path | None = None
        self.address = self._open()
        if watch is not None:
            watch.cleanup = self._remove_file
        ours, theirs = socket.socketpair()
        self._server.adopt(ours)
        self._client = ControlClient(Connection(theirs), 0, socket.gethostname(), self._interrupt)
        self._client.armed = False
        self._number = 0
        self._unusable = False
        self._interruptible = False  # whether the main thread may be interrupted
        self._main: int | None = None
        self._holds_sigterm = self._terminated = False
        atexit.register(self._close)

    def lead(self, payload: bytes, supervision: SupervisionOptions, timeout: float) -> list[bytes]:
        """Run a call on all ranks: a thread supervises it while this thread takes part."""
        if self._unusable:
            raise WorkerFailedError("the workers of this job have ended; start the job again")
        self._number += 1
        outcome: Future[None] = Future()
        returned = threading.Event()
        self._unusable = True  # until the call has succeeded
        self._prepare(returned)
        thread = threading.Thread(
            target=self._supervise, args=(payload, supervision, timeout, outcome, returned), daemon=True
        )
        values: list[bytes] | None = None
        try:
            self._interruptible = self._client.armed = True
            thread.start()
            values = self._take_part()
        except _AbortedError:
            pass
        finally:
            self._interruptible = self._client.armed = False
            returned.set()
            terminated = self._restore_sigterm()
        if values is None:
            outcome.result()
            raise WorkerFailedError("the worker group ended without an error; please report this as a bug")
        thread.join()
        self._unusable = len(self._server.connected) < self._cluster.size  # a lost worker is not replaced
        if terminated:
            signal.raise_signal(signal.SIGTERM)
        return values

    def executor(self, workers: int, timeout: float) -> Executor:
        """An executor on the other ranks, once all of them are connected."""
        until = time.monotonic() + timeout
        ranks = range(1, self._cluster.size)
        while absent := [rank for rank in ranks if rank not in self._server.connected]:
            self._server.poll(0.1)
            if time.monotonic() > until:
                message = missing(absent, self._cluster.size, timeout, self._hint())
                raise WorkerFailedError(message, absent[0])
        self._all_connected()
        processes = StartedProcesses(self._server, self._cluster.size)
        count = min(workers, len(ranks))
        return WorkerExecutor(count, lambda server: processes, self._server, ranks, same_script=True)

    def _take_part(self) -> list[bytes]:
        """Run the call as every other rank does, and return the results of all."""
        call = self._client.next_call()
        if not isinstance(call, Call):
            raise _AbortedError
        info = RankInfo(0, call.hosts or ("",), self._client)
        self._client.answer(perform(call.payload, info, through=(KeyboardInterrupt,)))
        results = self._client.next_call()
        if not isinstance(results, list):
            raise _AbortedError
        return results

    def _supervise(
        self,
        payload: bytes,
        supervision: SupervisionOptions,
        timeout: float,
        outcome: Future[None],
        returned: threading.Event,
    ) -> None:
        """In the thread: supervise the call; after an error end rank 0, unless its main thread returns."""
        processes = StartedProcesses(self._server, self._cluster.size, self._all_connected)
        try:
            group = WorkerGroup(self._server, processes, self._cluster.size, supervision)
            values = group.run(payload, self._number, timeout, self._hint())
            self._server.send_all("results", values)
            self._server.flush(SEND_RESULTS)
            outcome.set_result(None)
        except BaseException as error:  # noqa: BLE001 (the main thread raises it)
            outcome.set_exception(error)
            self._interrupt(1, False)
            hurry = self._cluster.starter == "mpirun" and len(self._server.connected) < self._cluster.size
            if not returned.wait(MAIN_RETURNS_MPIRUN if hurry else MAIN_RETURNS):
                print_error(error)
                os._exit(error.exit_code if isinstance(error, ManyhandsError) else 1)

    def _interrupt(self, code: int, lost: bool) -> None:
        """From a thread: end the main thread's call, wherever Python can."""
        self._client.orders.put(None)
        if self._main is not None and self._interruptible:
            signal.pthread_kill(self._main, _WAKE)

    def _prepare(self, returned: threading.Event) -> None:
        """Forget orders of an interrupted call, and install the handlers that a call needs.

        torchrun and mpirun send SIGTERM to all workers at once when one has died. Rank 0 then needs a moment
        to print which worker it was and what it was doing.
        """
        while not self._client.orders.empty():
            self._client.orders.get()
        self._main = None
        if threading.current_thread() is threading.main_thread():  # only it can have handlers
            self._main = threading.get_ident()
            signal.signal(_WAKE, self._wake)  # stays installed: a late signal must find a handler
            self._terminated = False
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, lambda number, frame: self._delay_sigterm(returned))
                self._holds_sigterm = True

    def _delay_sigterm(self, returned: threading.Event) -> None:
        def end() -> None:
            if not returned.wait(AFTER_SIGTERM):
                os._exit(128 + signal.SIGTERM)

        self._terminated = True
        threading.Thread(target=end, daemon=True).start()

    def _restore_sigterm(self) -> bool:
        """Restore the default handler of SIGTERM; returns whether the signal came meanwhile."""
        if self._holds_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._holds_sigterm = False
        return self._terminated

    def _wake(self, number: int, frame: FrameType | None) -> None:
        if self._interruptible:
            self._interruptible = False
            raise _AbortedError

    def _open(self) -> str:
        """Listen for the other ranks, and tell them where; returns the address."""
        cluster = self._cluster
        if cluster.size == 1:
            return ""
        if cluster.meets_here:
            key = new_key()
            address = self._server.listen(key)
            self._file = rendezvous.write_rendezvous(cluster, address, key)
            return address
        if cluster.address:
            key = rendezvous.key_of(os.environ)
            return self._listen(cluster.address, key)
        return rendezvous.broadcast(self._open_to)[0]

    def _open_to(self, hosts: list[str]) -> tuple[str, bytes]:
        """Listen at an address that these hosts can reach; returns it, and the key."""
        key = new_key()
        others = [host for host in hosts if host != socket.gethostname()]
        address = f"{addresses.outward(others)}:0" if others else None
        return self._listen(address, key), key

    def _listen(self, address: str | None, key: bytes) -> str:
        host, _, port = (address or "").rpartition(":")
        try:
            if host:
                addresses.check_reachable(host)
            return self._server.listen(key, address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                torchrun = self._cluster.starter == "torchrun"
                origin = "MASTER_PORT + 1" if torchrun else "from the job's number"
                advice = "choose another MASTER_PORT, or set" if torchrun else "set"
                if rendezvous.PORT in os.environ:
                    origin, advice = rendezvous.PORT, "choose another"
                raise UsageError(
                    f"port {port} on {host} is in use ({origin}): {advice} {rendezvous.PORT}"
                ) from None
            raise UsageError(
                f"worker 0 cannot listen at {address}: {error.strerror or error}; "
                f"{addresses.MASTER} must be an address of the host of worker 0, here {socket.gethostname()}"
            ) from None

    def _hint(self) -> str:
        if self._file is not None:
            return f"; they look for {self._file}"
        return f"; they should connect to {self.address}"

    def _all_connected(self) -> None:
        self._server.stop_listening()
        self._server.send_all("leader", socket.gethostname(), os.getpid())
        self._remove_file()

    def _remove_file(self) -> None:
        if self._file is not None:
            rendezvous.remove_file(self._file, self.address)
            self._file = None

    def _close(self) -> None:
        self._remove_file()
        with contextlib.suppress(OSError, RuntimeError):
            self._server.close()


@final
class StartedProcesses:
    """Processes that another program started: all that is seen of them is their connections."""

    reports_exits = can_kill_alone = can_restart = False
    starts_all_at_once = can_start_more = False

    def __init__(
        self, server: ControlServer, size: int, on_connected: Callable[[], None] | None = None
    ) -> None:
        self._server, self._size = server, size
        self._on_connected = on_connected

    def start(self, ranks: Sequence[int], title: str) -> None:
        """Nothing can be started."""

    def all_connected(self) -> None:
        """Run what was given for that moment."""
        if self._on_connected is not None:
            self._on_connected()

    def exits(self) -> dict[int, ProcessExit]:
        """Exits are not known."""
        return {}

    def is_gone(self, rank: int, disconnected: bool) -> bool:
        """True: they are not waited for, because they leave after this process has printed its message."""
        return True

    def is_stopped(self, rank: int) -> bool:
        """Unknown."""
        return False

    def kill_alone(self, rank: int) -> None:
        """Impossible: a worker that raised waits for the results, as if it had returned."""

    def kill(self, rank: int) -> None:
        """Left to the program that started it, which sees that this process has failed."""

    def kill_all(self) -> None:
        """Ask all other ranks to leave."""
        for rank in range(1, self._size):
            self._server.send(rank, "abort", 1)
        self._server.flush(1.0)

    def describe(self, rank: int) -> WorkerState:
        """The host and pid that it sent."""
        return WorkerState(rank, *self._server.identities.get(rank, ("", 0)))

    def close(self) -> None:
        """The executor is shut down; the connections stay."""
        for rank in range(1, self._size):
            self._server.send(rank, "end")
        self._server.flush(1.0)
