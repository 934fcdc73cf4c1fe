"""An executor whose calls run in the workers of a launcher, one a worker: a call that crashes fails alone.

A thread looks after the workers and is the only one that touches the hub:

    submit ──▶ pending ──▶ [thread] ── call ──▶ worker ── answer ──▶ [thread] ──▶ future
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar, final

from manyhands.core.errors import ManyhandsError, WorkerFailedError
from manyhands.launchers.control.remote_calls import CallResult, pack, unpack
from manyhands.launchers.control.server import ControlEvent, ControlServer
from manyhands.launchers.supervision import diagnosis
from manyhands.launchers.supervision.diagnosis import Ending, WorkerState

T = TypeVar("T")

TICK = 0.5
LEAVE = 1.0  # seconds to leave before being killed
STILLBORN = 3  # workers in a row that end before they begin: more would, too


class ExecutorProcesses(Protocol):
    """Where a pool's workers come from."""

    certain: bool  # whether it tells how each process ended
    together: bool  # whether all are started at once, when the first is needed
    replaces: bool  # whether new ones can come for those that are gone

    def start(self, ranks: Sequence[int], title: str) -> None:
        """Let these come; they say hello."""

    def ended(self) -> dict[int, Ending]:
        """How processes ended, of all that have; WorkerFailedError when it has lost sight of them."""

    def known(self, rank: int) -> WorkerState:
        """Rank, host and process of a worker."""

    def kill_all(self) -> None:
        """End all that are left, and take them back."""

    def close(self) -> None:
        """Give back what it holds."""


class _Item(NamedTuple):
    future: Future[Any]
    payload: bytes


@final
class WorkerExecutor(Executor):
    """At most so many calls at a time, each in a process that later ones use again."""

    def __init__(
        self,
        workers: int,
        hands: Callable[[ControlServer], ExecutorProcesses],
        hub: ControlServer | None = None,
        present: Iterable[int] = (),
        *,
        same_script: bool = False,
    ) -> None:
        """`hub` is one whose workers are `present`; it is not closed, and its workers are not killed."""
        self._size = workers
        self._make_hands = hands
        self._owns_hub = hub is None
        self._hub = hub or ControlServer()
        self._same_script = same_script
        self._lock = threading.Lock()
        self._pending: deque[_Item] = deque()
        self._closed = self._killed = False
        self._thread: threading.Thread | None = None
        # what follows belongs to the thread
        self._numbers = itertools.count()
        self._coming: set[int] = set()
        self._idle: set[int] = set(present)
        self._busy: dict[int, _Item] = {}
        self._lost: dict[int, float] = {}
        self._known: dict[int, WorkerState] = {}
        self._stillborn = 0

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run a call when a worker is free."""
        payload = pack(fn, args, kwargs, same_script=self._same_script)
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._pending.append(_Item(future, payload))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="manyhands-pool", daemon=True)
                self._thread.start()
        self._hub.wake()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """No more calls; what is running ends, and what is pending too unless it is canceled."""
        with self._lock:
            first, self._closed = not self._closed, True
            if cancel_futures:
                for item in self._pending:
                    item.future.cancel()
                    item.future.set_running_or_notify_cancel()  # whoever waits for it hears of it
                self._pending.clear()
        if self._thread is None:
            if first:
                if not self._owns_hub:
                    self._make_hands(self._hub).close()
                self._close()
            return
        self._hub.wake()
        if wait:
            self._thread.join()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Ctrl-C reaches this process only: nobody wants to wait for what was running.
        self._killed = kind is not None and issubclass(kind, KeyboardInterrupt)
        self.shutdown(wait=True, cancel_futures=self._killed)

    # ------------------------------------------------------------------ the thread
    def _run(self) -> None:
        hands: ExecutorProcesses | None = None
        try:
            hands = self._make_hands(self._hub)
            while not self._is_over():
                try:
                    self._hire(hands)
                    self._hand_out()
                    self._listen(hands)
                except WorkerFailedError as error:  # who starts workers is gone, and they with it
                    self._fail_running(error)
                    self._count_stillborn(error)
                    hands.close()
                    hands = self._make_hands(self._hub)
            if self._owns_hub:
                self._send_home(hands)
        except BaseException as error:  # noqa: BLE001 (a future that nobody completes would be waited for)
            self._fail_running(error)
            self._fail_pending(error)
            if hands is not None:
                hands.kill_all()
        finally:
            with self._lock:
                self._closed = True  # should it have failed: nobody is there any more
            if hands is not None:
                hands.close()
            self._close()

    def _is_over(self) -> bool:
        if self._killed:
            self._fail_running(WorkerFailedError("stopped by Ctrl-C"))
            return True
        with self._lock:
            return self._closed and not self._pending and not self._busy

    def _hire(self, hands: ExecutorProcesses) -> None:
        """Start as many as are needed, and no more than there may be."""
        here = len(self._coming) + len(self._idle) + len(self._busy)
        with self._lock:
            wanted = len(self._pending) - len(self._coming) - len(self._idle)
        if not hands.replaces:
            if not here:
                self._fail_pending(WorkerFailedError("no worker is left to run this call"))
            return
        count = min(wanted, self._size - here)
        if count > 0:
            ranks = [next(self._numbers) for _ in range(self._size - here if hands.together else count)]
            hands.start(ranks, "of a pool")
            self._coming.update(ranks)

    def _hand_out(self) -> None:
        while self._idle:
            with self._lock:
                if not self._pending:
                    return
                item = self._pending.popleft()
            if item.future.set_running_or_notify_cancel():
                rank = self._idle.pop()
                self._busy[rank] = item
                self._hub.send(rank, "call", 0, None, item.payload)

    def _listen(self, hands: ExecutorProcesses) -> None:
        for event in self._hub.poll(TICK):
            self._take(event, hands)
        now = time.monotonic()
        for rank, ending in hands.ended().items():
            self._ended(rank, ending)
        patient = 1.0 if hands.certain else 0.0
        for rank, since in list(self._lost.items()):
            if now - since >= patient:
                self._ended(rank, Ending("lost"))

    def _take(self, event: ControlEvent, hands: ExecutorProcesses) -> None:
        rank = event.rank
        if event.kind == "hello":
            one = self._known[rank] = hands.known(rank)
            one.host, one.pid = event.content
            self._coming.discard(rank)
            self._idle.add(rank)
            self._stillborn = 0
        elif event.kind == "lost":
            self._lost[rank] = time.monotonic()
        elif event.kind == "answer" and rank in self._busy:
            item = self._busy.pop(rank)
            self._idle.add(rank)
            self._complete(item, rank, event.content[1])

    def _complete(self, item: _Item, rank: int, answer: CallResult) -> None:
        if answer.failure is None:
            try:
                item.future.set_result(unpack(rank, answer.value))
            except ManyhandsError as error:
                item.future.set_exception(error)
            return
        message = f"{_name(self._known.get(rank))} {diagnosis.raised(answer.failure)}\n{answer.failure.trace}"
        item.future.set_exception(answer.failure.error() or WorkerFailedError(message.rstrip(), rank))

    def _ended(self, rank: int, ending: Ending) -> None:
        self._lost.pop(rank, None)
        self._idle.discard(rank)
        if rank in self._busy:
            message = f"{_name(self._known.get(rank))} {diagnosis.ended(ending)} in the middle of a call"
            self._busy.pop(rank).future.set_exception(WorkerFailedError(message, rank))
        elif rank in self._coming:
            self._coming.discard(rank)
            message = f"a worker {diagnosis.ended(ending)} before it began"
            self._count_stillborn(WorkerFailedError(message, rank))

    def _count_stillborn(self, error: WorkerFailedError) -> None:
        self._stillborn += 1
        if self._stillborn >= STILLBORN:
            self._stillborn = 0
            self._fail_pending(error)

    def _fail_running(self, error: BaseException) -> None:
        for item in self._busy.values():
            item.future.set_exception(error)
        for group in (self._busy, self._idle, self._coming, self._lost):
            group.clear()

    def _fail_pending(self, error: BaseException) -> None:
        with self._lock:
            items = list(self._pending)
            self._pending.clear()
        for item in items:
            if item.future.set_running_or_notify_cancel():
                item.future.set_exception(error)

    def _send_home(self, hands: ExecutorProcesses) -> None:
        if not self._killed:
            self._hub.send_all("end")
            until = time.monotonic() + LEAVE
            while self._hub.ranks and time.monotonic() < until:
                self._hub.poll(TICK / 10)
        hands.kill_all()

    def _close(self) -> None:
        if self._owns_hub:
            self._hub.close()


def _name(one: WorkerState | None) -> str:
    return f"a worker (host {one.host}, pid {one.pid})" if one else "a worker"
