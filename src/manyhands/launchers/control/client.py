"""A worker's line to its hub: a thread says what the worker is doing, carries what it tells, and obeys.

The thread is the only one that touches the wire. The worker's main thread may be stuck in native code for
ever, so when the hub says `abort`, or is gone, the thread ends the whole process at once: crash-only, nothing
may depend on a clean exit.
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
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, final

from manyhands.core.errors import ManyhandsError
from manyhands.core.rank_info import RankStatus
from manyhands.launchers.control.connection import Connection, check_size
from manyhands.launchers.control.remote_calls import CallResult
from manyhands.launchers.supervision.diagnosis import CodePosition
from manyhands.launchers.supervision.status_page import Address, slot

TICK = 0.1  # seconds between flushes of what was told
HEARTBEAT = 0.25  # seconds after which a status is sent even if it has not changed
LAST_WORDS = 0.5  # seconds to send what was told before the process ends

_PACKAGE = Path(__file__).parents[2]
# A main thread in these waits for other workers, unless a wrapper delays it or a fault strikes on purpose.
_WAITS = (f"{_PACKAGE}/transports/", "/torch/distributed/", "/mpi4py/", __file__)
_WAITS_NOT = (f"{_PACKAGE}/transports/wrapper.py", f"{_PACKAGE}/engine/fault_injection/")
_LIBRARY = f"{Path(threading.__file__).parent}/"


class Call(NamedTuple):
    """Something to do: for a gang with the hosts of all ranks, for a trial without."""

    number: int
    hosts: tuple[str, ...] | None
    payload: bytes
    board: Address | None = None  # where to write what one is doing
    gone: frozenset[int] = frozenset()
    posted: Mapping[str, bytes] | None = None  # for one that joins: what others left for it

    @property
    def joining(self) -> bool:
        """Whether the others are at work already."""
        return self.posted is not None


def leave(code: int, lost: bool) -> None:
    """End this process now, whatever its main thread is doing."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                _try_to_flush(stream)
    finally:  # without memory not even a thread can be started
        os._exit(code)


@final
class ControlClient:
    """A Line over a wire; `next_call`, `answer` and `results` are for whoever serves the calls."""

    stop: int | None = None
    status_slot: memoryview | None = None
    gone: frozenset[int] = frozenset()  # never changed in place: the worker reads it in another thread

    def __init__(
        self, wire: Connection, rank: int, host: str, ending: Callable[[int, bool], None] = leave
    ) -> None:
        """`ending` is called (with an exit code, and whether the hub was lost) in the thread, while armed."""
        self.armed = True
        self.orders: queue.SimpleQueue[Call | list[bytes] | None] = queue.SimpleQueue()
        self.lost = threading.Event()
        self.leader = ("", 0)  # host and process of whoever leads, where that is a worker too
        self._wire, self._rank = wire, rank
        self._ending = ending
        self._main = threading.main_thread().ident
        self._call = 0
        self._working = False  # whether a call is being carried out
        self._watch: Callable[[], RankStatus] | None = None
        self._lock = threading.Lock()
        self._told: list[bytes] = []
        self._out: deque[tuple[Any, ...]] = deque()
        self._posted: Mapping[str, bytes] = {}
        self._exchanged: queue.SimpleQueue[tuple[int, int, list[bytes | None]]] = queue.SimpleQueue()
        self._exchanges = 0
        self._counted = True  # whether exchanges wait for this worker
        self._admitted: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._exchanging = False
        self._said: RankStatus | None = None
        self._said_at = 0.0
        self._wake_end, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._poll = select.poll()  # not select.select, which knows no descriptor above 1,023
        self._poll.register(self._wake_end, select.POLLIN)
        wire.send("hello", rank, host, os.getpid())
        self._thread = threading.Thread(target=self._run, name="manyhands-link", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ the worker's side: a Line
    def exchange(self, value: Any) -> list[Any]:
        """Everybody's value by rank; all ranks must come here, and who is gone has None."""
        assert self._counted, "a worker that joins says `joined` before its first exchange"
        self._exchanges += 1
        asked = (self._call, self._exchanges)
        self._exchanging = True
        try:
            self._say("exchange", *asked, _frame(value))
            while True:
                call, number, values = self._exchanged.get()
                if (call, number) == asked:  # an earlier call may have been interrupted in one
                    return [None if each is None else _value(each) for each in values]
        finally:
            self._exchanging = False

    def tell(self, message: Any) -> None:
        """For the parent to hear; sent with the next tick."""
        frame = _frame(message)  # now: it may change before it is sent
        with self._lock:
            self._told.append(frame)

    def watch(self, status: Callable[[], RankStatus]) -> None:
        """From now on this function says what the worker is doing."""
        self._watch = status

    def post(self, name: str, value: Any) -> None:
        """A fact for those who join later; sent now, after all that was told."""
        frame = _frame(value)
        self._report(final=True)
        self._say("post", name, frame)

    def joined(self) -> int:
        """From now on exchanges wait for this worker; the next one has the number that others give it."""
        if not self._counted:
            self._say("joined", self._call)
            self._exchanges = self._admitted.get()
            self._counted = True
        return self._exchanges

    @property
    def posted(self) -> dict[str, Any]:
        """What had been posted when this worker joined."""
        return {name: _value(each) for name, each in self._posted.items()}

    # ------------------------------------------------------------------ for whoever serves the calls
    def next_call(self) -> Call | list[bytes] | None:
        """Wait for something to do, for everybody's results, or for None: there is nothing more."""
        order = self.orders.get()
        if isinstance(order, Call):
            self._call, self._exchanges, self._working = order.number, 0, True
            self._counted, self._posted = not order.joining, order.posted or {}
            self.status_slot = slot(order.board, self._rank)
        return order

    def answer(self, answer: CallResult) -> None:
        """Say what came of the call, after everything that was told during it."""
        self._report(final=True)
        self._working, self._watch = False, None
        self._say("answer", self._call, answer)

    def await_end(self, seconds: float) -> None:
        """In the thread: wait until the hub is gone, at most so long."""
        until = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._wire, select.POLLIN)
        with contextlib.suppress(EOFError, OSError):
            while (left := until - time.monotonic()) > 0:
                poll.poll(1000 * left)
                self._wire.messages()

    def close(self) -> None:
        """Send what is left and stop listening."""
        self.armed = False
        self._say(None)
        self._thread.join(LAST_WORDS + 1)

    # ------------------------------------------------------------------ the thread
    def _say(self, *message: Any) -> None:
        self._out.append(message)
        with contextlib.suppress(BlockingIOError):  # already awake
            os.write(self._waker, b"!")

    def _run(self) -> None:
        try:
            while self._turn_in_want():
                pass
            self._wire.flush_for(LAST_WORDS)
        except (EOFError, OSError, ManyhandsError) as error:
            if isinstance(error, ManyhandsError):  # all that was told at once is too much
                print(f"error: {error}", file=sys.stderr, flush=True)
            self.lost.set()
            if self.armed:
                self._ending(1, True)
            self.orders.put(None)
        finally:
            self._wire.close()

    def _turn_in_want(self) -> bool:
        """A round that is tried again when memory is short: the worker itself may be about to say so."""
        try:
            return self._turn()
        except MemoryError:
            time.sleep(TICK)
            return True

    def _turn(self) -> bool:
        """One round of listening and speaking; false when told to end."""
        both = select.POLLIN | select.POLLOUT
        self._poll.register(self._wire, both if self._wire.pending else select.POLLIN)
        ready = [fd for fd, _ in self._poll.poll(1000 * TICK)]
        if self._wake_end in ready:
            os.read(self._wake_end, 4096)
        if self._wire.fileno() in ready:
            for message in self._wire.messages():
                self._obey(*message)
        self._report()
        while self._out:
            message = self._out[0]
            if message == (None,):
                return False
            self._wire.send(*message)
            self._out.popleft()
        self._wire.flush()
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
        elif order == "where":
            self._out.append(("where", self._position()))
        elif order == "leader":
            self.leader = (content[0], content[1])
        elif order in ("results", "end"):
            self.armed = False  # here, not where it is read: the hub may be gone before that
            self.orders.put(content[0] if content else None)
        elif order == "abort":
            self._report(final=True)
            while self._out:
                self._wire.send(*self._out.popleft())
            self._wire.flush_for(LAST_WORDS)
            if self.armed:
                self._ending(content[0], False)

    def _report(self, final: bool = False) -> None:
        """Queue what was told, and the status when it is news."""
        now = time.monotonic()
        status = self._status()
        with self._lock:
            news = status != self._said or now - self._said_at >= HEARTBEAT
            if not (self._told or (news and self._working) or final):
                return
            told, self._told = self._told, []
            self._said, self._said_at = status, now
            self._out.append(("news", self._call, status, told))

    def _status(self) -> RankStatus | None:
        if self._watch is None:
            return None
        try:
            status = self._watch()
        except Exception:  # noqa: BLE001 (it looks at a worker in the middle of its work)
            return self._said
        if self._exchanging:  # whatever phase that is part of, it waits for others
            return status._replace(phase="wait", operation=f"exchange {self._exchanges}")
        return status

    def _position(self) -> CodePosition:
        frame = sys._current_frames().get(self._main or 0)
        if frame is None:
            return CodePosition("", False)
        return CodePosition("".join(traceback.format_stack(frame)), is_waiting(frame))


def is_waiting(innermost: FrameType) -> bool:
    """Whether a thread in this frame waits for other workers."""
    frame: FrameType | None = innermost
    # The standard library says how a thread waits, not why: whoever called it does.
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return False
    file = frame.f_code.co_filename
    return any(part in file for part in _WAITS) and not file.startswith(_WAITS_NOT)


def _frame(value: Any) -> bytes:
    return check_size(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))


def _value(frame: bytes) -> Any:
    return pickle.loads(frame)  # noqa: S301 (from our own workers)


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARY) and "-packages" not in file


def _try_to_flush(stream: Any) -> None:
    """Flush, unless the main thread is stuck in a write to it and holds its lock."""
    thread = threading.Thread(target=lambda: _quietly(stream.flush), daemon=True)
    thread.start()
    thread.join(0.2)


def _quietly(call: Callable[[], object]) -> None:
    with contextlib.suppress(OSError, ValueError):
        call()
