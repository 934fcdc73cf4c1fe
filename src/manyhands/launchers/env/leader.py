"""Rank 0 of a job that somebody else has started: it takes part in a gang and looks after it.

rank 0   main thread: the function    own line ──┐
         a thread: looks after all    hub ◀──────┤
rank 1   main thread: the function    line ──────┤
rank 2   ...                          line ──────┘
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
from manyhands.launchers.base import Supervision
from manyhands.launchers.control.client import Call, ControlClient
from manyhands.launchers.control.connection import Connection
from manyhands.launchers.control.remote_calls import perform
from manyhands.launchers.control.server import ControlServer, new_key
from manyhands.launchers.env import rendezvous
from manyhands.launchers.env.follower import say
from manyhands.launchers.env.orphans import OrphanWatch
from manyhands.launchers.env.rendezvous import StarterInfo
from manyhands.launchers.processes.executor import WorkerExecutor
from manyhands.launchers.supervision.diagnosis import Ending, WorkerState, missing
from manyhands.launchers.supervision.worker_group import WorkerGroup

LAST_WORDS = 1.0  # seconds between SIGTERM and the end of rank 0, if it has nothing to say
COME_BACK = 1.5  # seconds for rank 0's own call to end once the gang has; native code may never return
IN_A_HURRY = 0.1
DELIVER = 60.0  # seconds to send everybody's results to everybody
_WAKE = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2  # nobody else's signal


class _AbortedError(KeyboardInterrupt):
    """Raised in the main thread when its gang has ended; no Exception, so that nobody swallows it."""


@final
class EnvLeader:
    """The hub of all lines, its own among them, kept from launch to launch."""

    def __init__(self, found: StarterInfo, watch: OrphanWatch | None = None) -> None:
        self._found = found
        self._hub = ControlServer()
        self._note: Path | None = None
        self.address = self._open_up()
        if watch is not None:
            watch.farewell = self._remove_note
        ours, theirs = socket.socketpair()
        self._hub.adopt(ours)
        self._link = ControlClient(Connection(theirs), 0, socket.gethostname(), self._interrupt)
        self._link.armed = False
        self._number = 0
        self._spent = False
        self._inside = False  # whether the main thread may be interrupted
        self._main: int | None = None
        self._holds_sigterm = self._terminated = False
        atexit.register(self._close)

    def lead(self, payload: bytes, supervision: Supervision, gather: float) -> list[bytes]:
        """Make a call of the gang: a thread looks after it while this one takes part."""
        if self._spent:
            raise WorkerFailedError("the workers of this job have ended: start it again")
        self._number += 1
        verdict: Future[None] = Future()
        back = threading.Event()
        self._spent = True  # until it has gone well
        self._prepare(back)
        thread = threading.Thread(
            target=self._look_after, args=(payload, supervision, gather, verdict, back), daemon=True
        )
        values: list[bytes] | None = None
        try:
            self._inside = self._link.armed = True
            thread.start()
            values = self._take_part()
        except _AbortedError:
            pass
        finally:
            self._inside = self._link.armed = False
            back.set()
            terminated = self._put_back()
        if values is None:
            verdict.result()
            raise WorkerFailedError("the gang ended, and nobody said why")
        thread.join()
        self._spent = len(self._hub.ranks) < self._found.size  # who was lost does not come again
        if terminated:
            signal.raise_signal(signal.SIGTERM)
        return values

    def executor(self, workers: int, gather: float) -> Executor:
        """The other ranks as a pool, once all of them are here."""
        until = time.monotonic() + gather
        ranks = range(1, self._found.size)
        while absent := [rank for rank in ranks if rank not in self._hub.ranks]:
            self._hub.poll(0.1)
            if time.monotonic() > until:
                raise WorkerFailedError(missing(absent, self._found.size, gather, self._hint()), absent[0])
        self._all_here()
        hands = StartedProcesses(self._hub, self._found.size)
        return WorkerExecutor(min(workers, len(ranks)), lambda hub: hands, self._hub, ranks, same_script=True)

    def _take_part(self) -> list[bytes]:
        """As every other rank does."""
        call = self._link.next_call()
        if not isinstance(call, Call):
            raise _AbortedError
        info = RankInfo(0, call.hosts or ("",), self._link)
        self._link.answer(perform(call.payload, info, through=(KeyboardInterrupt,)))
        results = self._link.next_call()
        if not isinstance(results, list):
            raise _AbortedError
        return results

    def _look_after(
        self,
        payload: bytes,
        supervision: Supervision,
        gather: float,
        verdict: Future[None],
        back: threading.Event,
    ) -> None:
        """In the thread: the gang's life, and at its end rank 0's own, if its main thread does not return."""
        crew = StartedProcesses(self._hub, self._found.size, self._all_here)
        try:
            gang = WorkerGroup(self._hub, crew, self._found.size, supervision)
            values = gang.run(payload, self._number, gather, self._hint())
            self._hub.send_all("results", values)
            self._hub.flush(DELIVER)
            verdict.set_result(None)
        except BaseException as error:  # noqa: BLE001 (it is the main thread's to raise)
            verdict.set_exception(error)
            self._interrupt(1, False)
            # mpirun, which saw a worker die, does not wait for long.
            hurry = self._found.starter == "mpirun" and len(self._hub.ranks) < self._found.size
            if not back.wait(IN_A_HURRY if hurry else COME_BACK):
                say(error)
                os._exit(error.exit_code if isinstance(error, ManyhandsError) else 1)

    def _interrupt(self, code: int, lost: bool) -> None:
        """From a thread: end the main thread's call, wherever Python can."""
        self._link.orders.put(None)
        if self._main is not None and self._inside:
            signal.pthread_kill(self._main, _WAKE)

    def _prepare(self, back: threading.Event) -> None:
        """Forget what an interrupted gang left over, and let the main thread be interrupted.

        A starter that sees a worker die sends SIGTERM to all others at once. Rank 0 then needs a moment, or
        nobody would ever read which worker it was and what it was doing.
        """
        while not self._link.orders.empty():
            self._link.orders.get()
        self._main = None
        if threading.current_thread() is threading.main_thread():  # only it has handlers
            self._main = threading.get_ident()
            signal.signal(_WAKE, self._wake)  # for good: a late one must find somebody
            self._terminated = False
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, lambda number, frame: self._last_words(back))
                self._holds_sigterm = True

    def _last_words(self, back: threading.Event) -> None:
        def leave() -> None:
            if not back.wait(LAST_WORDS):
                os._exit(128 + signal.SIGTERM)

        self._terminated = True
        threading.Thread(target=leave, daemon=True).start()

    def _put_back(self) -> bool:
        """SIGTERM is what it was; returns whether it came meanwhile."""
        if self._holds_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._holds_sigterm = False
        return self._terminated

    def _wake(self, number: int, frame: FrameType | None) -> None:
        if self._inside:
            self._inside = False
            raise _AbortedError

    def _open_up(self) -> str:
        """Be found by the others."""
        found = self._found
        if found.size == 1:
            return ""
        if found.meets_here:
            key = new_key()
            address = self._hub.listen(key)
            self._note = rendezvous.invite(found, address, key)
            return address
        if found.address:
            key = rendezvous.key_of(os.environ)
            return self._listen(found.address, key)
        return rendezvous.broadcast(self._tell)[0]

    def _tell(self, hosts: list[str]) -> tuple[str, bytes]:
        """Where to find the hub, at one address that leads to these hosts, and by which key."""
        key = new_key()
        others = [host for host in hosts if host != socket.gethostname()]
        address = f"{addresses.outward(others)}:0" if others else None
        return self._listen(address, key), key

    def _listen(self, address: str | None, key: bytes) -> str:
        host, _, port = (address or "").rpartition(":")
        try:
            if host:
                addresses.check_reachable(host)
            return self._hub.listen(key, address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                how = "MASTER_PORT + 1" if self._found.starter == "torchrun" else "from the job's number"
                advice = "choose another MASTER_PORT, or set" if self._found.starter == "torchrun" else "set"
                if rendezvous.PORT in os.environ:
                    how, advice = rendezvous.PORT, "choose another"
                raise UsageError(
                    f"port {port} on {host} is in use ({how}): {advice} {rendezvous.PORT}"
                ) from None
            raise UsageError(
                f"worker 0 cannot listen at {address}: {error.strerror or error}; "
                f"{addresses.MASTER} must be an address of the host of worker 0, here {socket.gethostname()}"
            ) from None

    def _hint(self) -> str:
        if self._note is not None:
            return f"; they look for {self._note}"
        return f"; they were expected at {self.address}"

    def _all_here(self) -> None:
        self._hub.close_door()
        self._hub.send_all("leader", socket.gethostname(), os.getpid())
        self._remove_note()

    def _remove_note(self) -> None:
        if self._note is not None:
            rendezvous.remove_note(self._note, self.address)
            self._note = None

    def _close(self) -> None:
        self._remove_note()
        with contextlib.suppress(OSError, RuntimeError):
            self._hub.close()


@final
class StartedProcesses:
    """Processes of another starter: all that is seen of them is their lines."""

    certain = severs = restarts = False
    together = False
    replaces = False

    def __init__(self, hub: ControlServer, size: int, all_here: Callable[[], None] | None = None) -> None:
        self._hub, self._size = hub, size
        self._all_here = all_here

    def assembled(self) -> None:
        """Everyone has come."""
        if self._all_here is not None:
            self._all_here()

    def start(self, ranks: Sequence[int], title: str) -> None:
        """Nobody can be started."""

    def ended(self) -> dict[int, Ending]:
        """It is not known how."""
        return {}

    def is_gone(self, rank: int, unlinked: bool) -> bool:
        """Nobody is waited for: they leave when this process has said why, and is gone."""
        return True

    def is_stopped(self, rank: int) -> bool:
        """It is not known."""
        return False

    def sever(self, rank: int) -> None:
        """One that raised waits for the others' results, as if it had returned."""

    def kill(self, rank: int) -> None:
        """That is the starter's to do, when it sees that this process has failed."""

    def kill_all(self) -> None:
        """Ask them to leave."""
        for rank in range(1, self._size):
            self._hub.send(rank, "abort", 1)
        self._hub.flush(1.0)

    def known(self, rank: int) -> WorkerState:
        """What it said of itself."""
        return WorkerState(rank, *self._hub.who.get(rank, ("", 0)))

    def close(self) -> None:
        """The pool is over; the lines stay."""
        for rank in range(1, self._size):
            self._hub.send(rank, "end")
        self._hub.flush(1.0)
