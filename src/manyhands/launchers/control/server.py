"""The leader's end of all control channels: processes that know the key may connect, one loop reads them all.

`poll` belongs to one thread, and so does everything else here except `wake`.
"""

from __future__ import annotations

import contextlib
import errno
import pickle
import selectors
import socket
import time
from typing import Any, NamedTuple, Self, final

from manyhands.launchers.control.connection import Connection
from manyhands.launchers.control.handshake import ServerHandshake, listen, tune

HANDSHAKE = 10.0  # seconds for a handshake
MAX_HANDSHAKES = 256  # at a time; a worker that is dropped as the oldest connects again
BACK_OFF = 0.5  # seconds without accepting connections when there are no descriptors left


_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ControlEvent(NamedTuple):
    """What a worker sent: `hello`, `report`, `position`, `joined`, `result`; or `lost`: it disconnected."""

    rank: int
    kind: str
    content: tuple[Any, ...] = ()


@final
class ControlServer:
    """Receives what workers send, completes their exchanges, and sends orders; nothing it does blocks."""

    def __init__(self) -> None:
        self._size = 0  # how many workers take part in an exchange
        self.identities: dict[int, tuple[str, int]] = {}  # host and pid of all that have ever said hello
        self.gone: frozenset[int] = frozenset()  # ranks that take no part in exchanges; all workers know them
        self.posted: dict[str, bytes] = {}  # pickled values for replacements
        self._connections: dict[int, Connection] = {}
        self._ranks: dict[Connection, int] = {}
        self._handshakes: dict[Connection, ServerHandshake] = {}
        self._nameless: set[Connection] = set()  # trusted, but have not said hello
        self._listener: socket.socket | None = None
        self._paused_until: float | None = None  # when connections are accepted again, if they are not now
        self._key = b""
        self._exchanges: dict[tuple[int, int], dict[int, bytes]] = {}
        self._completed = 0  # the number of the last completed exchange
        self._returned: set[int] = set()  # exchanges do not wait for these
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
        """Let workers connect, and return the address to connect to; OSError if it is in use."""
        assert self._listener is None
        self._listener, found = listen(address)
        self._key = key
        self._selector.register(self._listener, selectors.EVENT_READ)
        return found

    def stop_listening(self) -> None:
        """All workers are connected: no other process may connect."""
        if self._listener is not None:
            self._resume_accepting()
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        for connection in list(self._handshakes):
            self._drop(connection)

    def start_call(self, size: int) -> None:
        """A group of this size starts a call; incomplete exchanges of an earlier call are forgotten."""
        self._size = size
        self._exchanges.clear()
        self._completed = 0
        self._returned.clear()
        self.gone, self.posted = frozenset(), {}

    def mark_gone(self, rank: int) -> None:
        """Complete exchanges without a rank, also those that wait for it now, and tell all workers."""
        if rank in self.gone:
            return
        self.gone |= {rank}
        self.send_all("gone", self.gone)
        for values in self._exchanges.values():
            values.pop(rank, None)
        self._complete_all()

    def mark_returned(self, rank: int) -> None:
        """Complete exchanges without a rank that has returned: a replacement may call more of them."""
        self._returned.add(rank)
        self._complete_all()

    def mark_joined(self, rank: int) -> None:
        """Let exchanges wait for a rank again, also the current one: the others' next one is its next one."""
        self.gone -= {rank}
        self.send_all("gone", self.gone)
        self.send(rank, "joined", self._completed)

    def disconnect(self, rank: int) -> None:
        """Close a rank's connection and forget it: a replacement may connect."""
        if rank in self._connections:
            self._drop(self._connections[rank])

    def adopt(self, sock: socket.socket) -> None:
        """Use one end of a socket pair whose other end was given to a worker."""
        connection = Connection(sock)
        self._nameless.add(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def watch(self, source: Any) -> None:
        """Let `poll` also return when this is readable; its owner reads it."""
        self._selector.register(source, selectors.EVENT_READ)

    def unwatch(self, source: Any) -> None:
        """Undo `watch`."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)

    @property
    def connected(self) -> set[int]:
        """The ranks that are connected."""
        return set(self._connections)

    def send(self, rank: int, *order: Any) -> None:
        """Send an order to one worker, if it is connected."""
        connection = self._connections.get(rank)
        if connection is not None:
            connection.send(*order)
            self._flush(connection)

    def send_all(self, *order: Any) -> None:
        """Send an order to every worker."""
        frame = pickle.dumps(order, pickle.HIGHEST_PROTOCOL)
        for connection in list(self._connections.values()):
            connection.send_frame(frame)
            self._flush(connection)

    def wake(self) -> None:
        """Let `poll` return now; from any thread."""
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def poll(self, timeout: float) -> list[ControlEvent]:
        """Wait for events, at most this long; those of one worker are in the order in which it sent them."""
        events: list[ControlEvent] = []
        if self._paused_until is not None:
            timeout = min(timeout, max(0.0, self._paused_until - time.monotonic()))
        for key, mask in self._selector.select(timeout):
            source = key.fileobj
            if source is self._listener:
                self._accept()
            elif source is self._wake_end:
                with contextlib.suppress(OSError):
                    self._wake_end.recv(4096)
            elif isinstance(source, Connection) and self._is_open(source):
                if mask & selectors.EVENT_WRITE:
                    self._flush(source)
                if mask & selectors.EVENT_READ:
                    self._read(source, events)
        self._drop_late_handshakes()
        if self._paused_until is not None and time.monotonic() >= self._paused_until:
            self._resume_accepting()
        return events

    def flush(self, seconds: float) -> None:
        """Send what is still queued, for at most this long."""
        until = time.monotonic() + seconds
        for connection in list(self._connections.values()):
            connection.flush_for(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Close all connections; workers that are still connected notice it."""
        self.stop_listening()
        for connection in [*self._connections.values(), *self._nameless]:
            self._drop(connection)
        self._selector.close()
        self._wake_end.close()
        self._waker.close()

    def _is_open(self, connection: Connection) -> bool:
        return connection in self._handshakes or connection in self._nameless or connection in self._ranks

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if (
                error.errno in _OUT_OF_RESOURCES
            ):  # the listener stays readable: without a pause `poll` would spin
                self._drop_oldest_handshake()
                self._selector.unregister(self._listener)
                self._paused_until = time.monotonic() + BACK_OFF
            return  # or the peer closed before it was accepted
        if len(self._handshakes) >= MAX_HANDSHAKES:
            self._drop_oldest_handshake()
        tune(sock)
        handshake = ServerHandshake(sock, self._key, time.monotonic())
        self._handshakes[handshake.connection] = handshake
        self._selector.register(handshake.connection, selectors.EVENT_READ)

    def _resume_accepting(self) -> None:
        if self._paused_until is not None and self._listener is not None:
            self._selector.register(self._listener, selectors.EVENT_READ)
        self._paused_until = None

    def _read(self, connection: Connection, events: list[ControlEvent]) -> None:
        handshake = self._handshakes.get(connection)
        try:
            if handshake is not None:
                if handshake.advance():
                    del self._handshakes[connection]
                    self._nameless.add(connection)
                    self._flush(connection)
                return
            for message in connection.messages():
                self._take(connection, message, events)
        except EOFError:
            rank = self._drop(connection)
            if rank is not None:
                events.append(ControlEvent(rank, "lost"))

    def _take(self, connection: Connection, message: tuple[Any, ...], events: list[ControlEvent]) -> None:
        kind, *content = message
        if kind == "hello":
            rank = content[0]
            if connection not in self._nameless or rank in self._connections:
                self._drop(connection)  # a rank connects once
                return
            self._nameless.remove(connection)
            self._connections[rank], self._ranks[connection] = connection, rank
            self.identities[rank] = (content[1], content[2])
            events.append(ControlEvent(rank, kind, tuple(content[1:])))
        elif connection in self._ranks:
            rank = self._ranks[connection]
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
        """Send all values to all workers, once every rank that can take part has sent its own."""
        values = self._exchanges[call, number]
        if all(rank in values or rank in self.gone or rank in self._returned for rank in range(self._size)):
            del self._exchanges[call, number]
            self._completed = number
            self.send_all("exchange", call, number, [values.get(rank) for rank in range(self._size)])

    def _flush(self, connection: Connection) -> None:
        try:
            connection.flush()
        except OSError:  # it is closed: reading notices that, after what had still arrived
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.pending else 0)
        if self._selector.get_key(connection).events != events:
            self._selector.modify(connection, events)

    def _drop(self, connection: Connection) -> int | None:
        """Close a connection, and return whose it was."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()
        self._handshakes.pop(connection, None)
        self._nameless.discard(connection)
        rank = self._ranks.pop(connection, None)
        if rank is not None:
            del self._connections[rank]
        return rank

    def _drop_oldest_handshake(self) -> None:
        for connection in list(self._handshakes)[:1]:
            self._drop(connection)

    def _drop_late_handshakes(self) -> None:
        now = time.monotonic()
        late = [each.connection for each in self._handshakes.values() if now - each.since > HANDSHAKE]
        for connection in late:
            self._drop(connection)
