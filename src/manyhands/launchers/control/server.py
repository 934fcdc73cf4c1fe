"""The leader's end of all lines: whoever knows the key may link up, and all that comes is read in one loop.

`poll` belongs to one thread, and so does everything else here except `wake`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import selectors
import socket
import time
from typing import Any, NamedTuple, Self, final

from manyhands.launchers.control.connection import Connection, PendingConnection, listen, tune

HANDSHAKE = 10.0  # seconds a stranger has to say who it is
STRANGERS = 256  # at a time; workers who are shown out with the oldest come again
BREATH = 0.5  # seconds without a look at the door when there are no descriptors left


_OUT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ControlEvent(NamedTuple):
    """What came from a worker: `hello`, `news`, `where`, `joined`, `answer`, or `lost`: its line closed."""

    rank: int
    kind: str
    content: tuple[Any, ...] = ()


@final
class ControlServer:
    """Reads what workers say, hands out what they exchange, and sends orders; nothing it does blocks."""

    def __init__(self) -> None:
        self._size = 0  # how many take part in an exchange
        self.who: dict[int, tuple[str, int]] = {}  # host and process of all that have ever said hello
        self.gone: frozenset[int] = frozenset()  # who takes no part in exchanges, and everybody knows it
        self.posted: dict[str, bytes] = {}  # facts for those who join, pickled
        self._peers: dict[int, Connection] = {}
        self._ranks: dict[Connection, int] = {}
        self._strangers: dict[
            Connection, PendingConnection | None
        ] = {}  # None: known, and about to say hello
        self._listener: socket.socket | None = None
        self._shut_until: float | None = None  # when the door is opened again, if it is shut for a while
        self._key = b""
        self._exchanges: dict[tuple[int, int], dict[int, bytes]] = {}
        self._completed = 0  # the number of the last one
        self._retired: set[int] = set()  # who has returned, and is not waited for
        self._selector = selectors.DefaultSelector()
        self._wake_end, self._waker = socket.socketpair()
        self._wake_end.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._wake_end, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def listen(self, key: bytes, address: str | None = None) -> str:
        """Let workers connect, and return the address by which they do; OSError when it is taken."""
        assert self._listener is None
        self._listener, found = listen(address)
        self._key = key
        self._selector.register(self._listener, selectors.EVENT_READ)
        return found

    def close_door(self) -> None:
        """Everyone is here: nobody else may come."""
        if self._listener is not None:
            self._reopen()
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        for wire in [wire for wire, stranger in self._strangers.items() if stranger is not None]:
            self._drop(wire)

    def begin(self, size: int) -> None:
        """A gang of so many begins a call; what an earlier one left half exchanged is forgotten."""
        self._size = size
        self._exchanges.clear()
        self._completed = 0
        self._retired.clear()
        self.gone, self.posted = frozenset(), {}

    def excuse(self, rank: int) -> None:
        """Let exchanges go on without a rank, also those that wait for it now, and tell everybody."""
        if rank in self.gone:
            return
        self.gone |= {rank}
        self.send_all("gone", self.gone)
        for values in self._exchanges.values():
            values.pop(rank, None)
        self._complete_all()

    def retire(self, rank: int) -> None:
        """Let exchanges wait no more for a rank that has returned: one that joined late may come to them."""
        self._retired.add(rank)
        self._complete_all()

    def admit(self, rank: int) -> None:
        """Let exchanges wait for a rank again, also the one that is going on: their next is its next."""
        self.gone -= {rank}
        self.send_all("gone", self.gone)
        self.send(rank, "joined", self._completed)

    def cut(self, rank: int) -> None:
        """Close a rank's line, and forget it: another may come in its place."""
        if rank in self._peers:
            self._drop(self._peers[rank])

    def adopt(self, sock: socket.socket) -> None:
        """Take over one end of a socket pair whose other end was given to a worker."""
        wire = Connection(sock)
        self._strangers[wire] = None
        self._selector.register(wire, selectors.EVENT_READ)

    def watch(self, source: Any) -> None:
        """Let `poll` also return when this has something to read, which its owner does."""
        self._selector.register(source, selectors.EVENT_READ)

    def unwatch(self, source: Any) -> None:
        """No longer."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)

    @property
    def ranks(self) -> set[int]:
        """Who is linked up."""
        return set(self._peers)

    def send(self, rank: int, *order: Any) -> None:
        """An order to one worker, if it is there."""
        wire = self._peers.get(rank)
        if wire is not None:
            wire.send(*order)
            self._flush(wire)

    def send_all(self, *order: Any) -> None:
        """An order to every worker."""
        frame = pickle.dumps(order, pickle.HIGHEST_PROTOCOL)
        for wire in list(self._peers.values()):
            wire.send_frame(frame)
            self._flush(wire)

    def wake(self) -> None:
        """Let `poll` return now; from any thread."""
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def poll(self, timeout: float) -> list[ControlEvent]:
        """Wait until something comes, at most so long, and return what came, in its order for each worker."""
        events: list[ControlEvent] = []
        if self._shut_until is not None:
            timeout = min(timeout, max(0.0, self._shut_until - time.monotonic()))
        for key, mask in self._selector.select(timeout):
            source = key.fileobj
            if source is self._listener:
                self._accept()
            elif source is self._wake_end:
                with contextlib.suppress(OSError):
                    self._wake_end.recv(4096)
            elif isinstance(source, Connection) and (source in self._strangers or source in self._ranks):
                if mask & selectors.EVENT_WRITE:
                    self._flush(source)
                if mask & selectors.EVENT_READ:
                    self._read(source, events)
        self._show_out_the_silent()
        if self._shut_until is not None and time.monotonic() >= self._shut_until:
            self._reopen()
        return events

    def flush(self, seconds: float) -> None:
        """Send what is still queued, for at most so long."""
        until = time.monotonic() + seconds
        for wire in list(self._peers.values()):
            wire.flush_for(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Close everything: whoever is still linked up sees it."""
        self.close_door()
        for wire in [*self._peers.values(), *self._strangers]:
            self._drop(wire)
        self._selector.close()
        self._wake_end.close()
        self._waker.close()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _OUT_OF:  # whoever waits at the door stays there: do not look all the time
                self._show_out_the_oldest()
                self._selector.unregister(self._listener)
                self._shut_until = time.monotonic() + BREATH
            return  # or it hung up before it was answered
        if sum(one is not None for one in self._strangers.values()) >= STRANGERS:
            self._show_out_the_oldest()
        tune(sock)
        stranger = PendingConnection(sock, self._key, time.monotonic())
        self._strangers[stranger.wire] = stranger
        self._selector.register(stranger.wire, selectors.EVENT_READ)

    def _reopen(self) -> None:
        """Look at the door again."""
        if self._shut_until is not None and self._listener is not None:
            self._selector.register(self._listener, selectors.EVENT_READ)
        self._shut_until = None

    def _read(self, wire: Connection, events: list[ControlEvent]) -> None:
        stranger = self._strangers.get(wire)
        try:
            if stranger is not None:
                if stranger.hear():
                    self._strangers[wire] = None
                    self._flush(wire)
                return
            for message in wire.messages():
                self._take(wire, message, events)
        except EOFError:
            rank = self._drop(wire)
            if rank is not None:
                events.append(ControlEvent(rank, "lost"))

    def _take(self, wire: Connection, message: tuple[Any, ...], events: list[ControlEvent]) -> None:
        kind, *content = message
        if kind == "hello":
            rank = content[0]
            if wire in self._ranks or rank in self._peers:
                self._drop(wire)  # a rank comes once
                return
            del self._strangers[wire]
            self._peers[rank], self._ranks[wire] = wire, rank
            self.who[rank] = (content[1], content[2])
            events.append(ControlEvent(rank, kind, tuple(content[1:])))
        elif wire in self._ranks:
            rank = self._ranks[wire]
            if kind == "exchange":
                self._exchange(rank, *content)
            elif kind == "post":
                self.posted[content[0]] = content[1]
            else:
                events.append(ControlEvent(rank, kind, tuple(content)))

    def _exchange(self, rank: int, call: int, number: int, value: bytes) -> None:
        if rank not in self.gone:
            self._exchanges.setdefault((call, number), {})[rank] = value
            self._complete(call, number)

    def _complete_all(self) -> None:
        for call, number in sorted(self._exchanges):
            self._complete(call, number)

    def _complete(self, call: int, number: int) -> None:
        """Hand out what is exchanged, once everybody has come who can."""
        values = self._exchanges[call, number]
        if all(rank in values or rank in self.gone or rank in self._retired for rank in range(self._size)):
            del self._exchanges[call, number]
            self._completed = number
            self.send_all("exchange", call, number, [values.get(rank) for rank in range(self._size)])

    def _flush(self, wire: Connection) -> None:
        try:
            wire.flush()
        except OSError:  # it is gone, and reading from it will say so after what it still had to say
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wire.pending else 0)
        if self._selector.get_key(wire).events != events:
            self._selector.modify(wire, events)

    def _drop(self, wire: Connection) -> int | None:
        """Close a line, and return whose it was."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(wire)
        wire.close()
        self._strangers.pop(wire, None)
        rank = self._ranks.pop(wire, None)
        if rank is not None:
            del self._peers[rank]
        return rank

    def _show_out_the_oldest(self) -> None:
        """Of those who have not said who they are, the one who has had the most time."""
        for wire in [wire for wire, one in self._strangers.items() if one is not None][:1]:
            self._drop(wire)

    def _show_out_the_silent(self) -> None:
        now = time.monotonic()
        late = [wire for wire, one in self._strangers.items() if one and now - one.since > HANDSHAKE]
        for wire in late:
            self._drop(wire)


def new_key() -> bytes:
    """A secret for one gang."""
    return os.urandom(32)
