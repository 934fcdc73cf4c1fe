"""A worker's end of the control channel: a thread sends status and messages, and obeys the server's orders.

The thread is the only one that uses the connection. The worker's main thread may be stuck in native code
forever, so when the server sends `abort`, or is gone, the thread ends the whole process at once: crash-only,
nothing may depend on a clean exit.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

from manyhands.core.errors import ManyhandsError
from manyhands.core.rank_info import RankStatus
from manyhands.launchers.control.code_position import position_of
from manyhands.launchers.control.connection import Connection, check_size
from manyhands.launchers.control.remote_calls import CallResult
from manyhands.launchers.control.status_page import PageAddress, slot

TICK = 0.1  # seconds between two sends of queued messages
HEARTBEAT = 0.25  # seconds after which a status is sent even if it has not changed
FINAL_FLUSH = 0.5  # seconds to send what is queued before the process ends


class Call(NamedTuple):
    """A function to run: for a worker group with the hosts of all ranks, for an executor without."""

    number: int
    hosts: tuple[str, ...] | None
    payload: bytes
    status_page: PageAddress | None = None
    gone: frozenset[int] = frozenset()
    posted: Mapping[str, bytes] | None = None  # for a replacement: what other workers have posted

    @property
    def joining(self) -> bool:
        """Whether the other workers are running already."""
        return self.posted is not None


def end_process(code: int, lost: bool) -> None:
    """End this process now, whatever its main thread is doing."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                _try_to_flush(stream)
    finally:  # without memory not even a thread can be started
        os._exit(code)


@final
class ControlClient:
    """A ControlChannel over a connection; `next_call`, `answer`, `close` are for the code that runs calls."""

    stop: int | None = None
    status_slot: memoryview | None = None
    gone: frozenset[int] = frozenset()  # replaced, never changed: the worker reads it in another thread

    def __init__(
        self,
        connection: Connection,
        rank: int,
        host: str,
        on_end: Callable[[int, bool], None] = end_process,
    ) -> None:
        """`on_end(exit code, whether the server was lost)` is called in the thread, while armed."""
        self.armed = True
        self.orders: queue.SimpleQueue[Call | list[bytes] | None] = queue.SimpleQueue()
        self.lost = threading.Event()
        self.leader = ("", 0)  # host and pid of the leader, if it is a worker, too
        self._connection, self._rank = connection, rank
        self._on_end = on_end
        self._main = threading.main_thread().ident
        self._call = 0
        self._working = False  # whether a call is running
        self._status_source: Callable[[], RankStatus] | None = None
        self._lock = threading.Lock()
        self._messages: list[bytes] = []
        self._outgoing: deque[tuple[Any, ...]] = deque()
        self._posted: Mapping[str, bytes] = {}
        self._exchanged: queue.SimpleQueue[tuple[int, int, list[bytes | None]]] = queue.SimpleQueue()
        self._exchanges = 0
        self._takes_part = True  # whether exchanges wait for this worker
        self._admitted: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._exchanging = False
        self._sent_status: RankStatus | None = None
        self._sent_at = 0.0
        self._wake_end, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._poll = select.poll()  # not select.select, which cannot use descriptors above 1,023
        self._poll.register(self._wake_end, select.POLLIN)
        connection.send("hello", rank, host, os.getpid())
        self._thread = threading.Thread(target=self._run, name="manyhands-control", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ the worker's side: a ControlChannel
    def exchange(self, value: Any) -> list[Any]:
        """All workers' values by rank, None for those that are gone; all ranks must call it."""
        assert self._takes_part, "a replacement calls `joined` before its first exchange"
        self._exchanges += 1
        current = (self._call, self._exchanges)
        self._exchanging = True
        try:
            self._send("exchange", *current, _pickled(value))
            while True:
                call, number, values = self._exchanged.get()
                if (call, number) == current:  # an earlier call may have been interrupted in an exchange
                    return [None if each is None else _unpickled(each) for each in values]
        finally:
            self._exchanging = False

    def tell(self, message: Any) -> None:
        """Send a message to the parent, with the next tick."""
        frame = _pickled(message)  # now: it may change before it is sent
        with self._lock:
            self._messages.append(frame)

    def watch(self, status: Callable[[], RankStatus]) -> None:
        """From now on this function returns the worker's status."""
        self._status_source = status

    def post(self, name: str, value: Any) -> None:
        """Leave a value for replacements; sent now, after all earlier messages."""
        frame = _pickled(value)
        self._report(final=True)
        self._send("post", name, frame)

    def joined(self) -> int:
        """From now on exchanges wait for this worker; returns how many the others have completed."""
        if not self._takes_part:
            self._send("joined", self._call)
            self._exchanges = self._admitted.get()
            self._takes_part = True
        return self._exchanges

    @property
    def posted(self) -> dict[str, Any]:
        """What had been posted when this worker joined."""
        return {name: _unpickled(each) for name, each in self._posted.items()}

    # ------------------------------------------------------------------ for the code that runs calls
    def next_call(self) -> Call | list[bytes] | None:
        """Wait for a call, for the results of all workers, or for None: there are no more."""
        order = self.orders.get()
        if isinstance(order, Call):
            self._call, self._exchanges, self._working = order.number, 0, True
            self._takes_part, self._posted = not order.joining, order.posted or {}
            self.status_slot = slot(order.status_page, self._rank)
        return order

    def answer(self, result: CallResult) -> None:
        """Send the result of the call, after all messages that were sent during it."""
        self._report(final=True)
        self._working, self._status_source = False, None
        self._send("result", self._call, result)

    def await_close(self, seconds: float) -> None:
        """In the thread: wait until the server has closed the connection, at most this long."""
        until = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        with contextlib.suppress(EOFError, OSError):
            while (left := until - time.monotonic()) > 0:
                poll.poll(1000 * left)
                self._connection.messages()

    def close(self) -> None:
        """Send what is queued and end the thread."""
        self.armed = False
        self._send(None)
        self._thread.join(FINAL_FLUSH + 1)

    # ------------------------------------------------------------------ the thread
    def _send(self, *message: Any) -> None:
        self._outgoing.append(message)
        with contextlib.suppress(BlockingIOError):  # already awake
            os.write(self._waker, b"!")

    def _run(self) -> None:
        try:
            while self._turn_despite_low_memory():
                pass
            self._connection.flush_for(FINAL_FLUSH)
        except (EOFError, OSError, ManyhandsError) as error:
            if isinstance(error, ManyhandsError):  # the messages of one tick are too large together
                print(f"error: {error}", file=sys.stderr, flush=True)
            self.lost.set()
            if self.armed:
                self._on_end(1, True)
            self.orders.put(None)
        finally:
            self._connection.close()

    def _turn_despite_low_memory(self) -> bool:
        """One round, repeated later if memory is short: the worker itself may be about to report that."""
        try:
            return self._turn()
        except MemoryError:
            time.sleep(TICK)
            return True

    def _turn(self) -> bool:
        """One round of receiving and sending; false if the thread is to end."""
        both = select.POLLIN | select.POLLOUT
        self._poll.register(self._connection, both if self._connection.pending else select.POLLIN)
        ready = [fd for fd, _ in self._poll.poll(1000 * TICK)]
        if self._wake_end in ready:
            os.read(self._wake_end, 4096)
        if self._connection.fileno() in ready:
            for message in self._connection.messages():
                self._obey(*message)
        self._report()
        while self._outgoing:
            message = self._outgoing[0]
            if message == (None,):
                return False
            self._connection.send(*message)
            self._outgoing.popleft()
        self._connection.flush()
        return True

    def _obey(self, order: str, *content: Any) -> None:
        if order == "call":
            call = Call(*content)
            self.stop, self.gone = None, call.gone - {self._rank}
            self.orders.put(call)
        elif order == "exchange":
            self._exchanged.put((content[0], content[1], content[2]))
        elif order == "stop":
            self.stop = content[0]
        elif order == "gone":
            self.gone = content[0] - {self._rank}
        elif order == "joined":
            self._admitted.put(content[0])
        elif order == "position":
            self._outgoing.append(("position", position_of(self._main)))
        elif order == "leader":
            self.leader = (content[0], content[1])
        elif order in ("results", "end"):
            self.armed = False  # here, not where it is read: the server may be gone before that
            self.orders.put(content[0] if content else None)
        elif order == "abort":
            self._report(final=True)
            while self._outgoing:
                self._connection.send(*self._outgoing.popleft())
            self._connection.flush_for(FINAL_FLUSH)
            if self.armed:
                self._on_end(content[0], False)

    def _report(self, final: bool = False) -> None:
        """Queue the messages, and the status if it has changed or is due."""
        now = time.monotonic()
        status = self._status()
        with self._lock:
            due = status != self._sent_status or now - self._sent_at >= HEARTBEAT
            if not (self._messages or (due and self._working) or final):
                return
            messages, self._messages = self._messages, []
            self._sent_status, self._sent_at = status, now
            self._outgoing.append(("report", self._call, status, messages))

    def _status(self) -> RankStatus | None:
        if self._status_source is None:
            return None
        try:
            status = self._status_source()
        except Exception:  # noqa: BLE001 (it reads a worker that is in the middle of its work)
            return self._sent_status
        if self._exchanging:  # in any phase: it waits for other workers
            return status._replace(phase="wait", operation=f"exchange {self._exchanges}")
        return status


def _pickled(value: Any) -> bytes:
    return check_size(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))


def _unpickled(frame: bytes) -> Any:
    return pickle.loads(frame)  # noqa: S301 (from our own workers)


def _try_to_flush(stream: Any) -> None:
    """Flush, unless the main thread is stuck in a write to it and holds its lock."""
    thread = threading.Thread(target=lambda: _quietly(stream.flush), daemon=True)
    thread.start()
    thread.join(0.2)


def _quietly(call: Callable[[], object]) -> None:
    with contextlib.suppress(OSError, ValueError):
        call()
