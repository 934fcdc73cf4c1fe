"""Messages over a socket that never blocks; once the handshake is done, every frame is authenticated.

    frame    8 bytes of length, then that many bytes: a pickled tuple; raw bytes during the handshake
    after the handshake a frame begins with its tag (frame_mac.py), which is checked before the frame is used

Nothing is unpickled before the handshake is done (handshake.py), and nothing that was changed on its way. The
two ends of a socket pair need neither, because no other process has them. Nothing blocks: a worker that was
stopped in the middle of a message, or a peer that sends nothing, must not hold up the supervisor.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import time
import weakref
from collections import deque
from typing import Any, final

from manyhands.core.errors import ManyhandsError
from manyhands.launchers.control.frame_mac import TAG, SessionMacs

LENGTH = struct.Struct("!Q")
MAX_VALUE = 2**28  # bytes: results and status travel here, tensors travel by a transport
OVERHEAD = 2**16  # bytes of a frame besides its value: the tag and the message around it
_CHUNK = 2**20  # bytes per read: memory is allocated for what has arrived, not for what was announced
_MAX_READS = 64  # in a row, so that one busy worker does not starve the others


_open: weakref.WeakSet[Connection] = weakref.WeakSet()


def check_size(value: bytes, overhead: int = 0) -> bytes:
    """Refuse a value that the other end would refuse; a frame may have some more bytes."""
    limit = MAX_VALUE + overhead
    if len(value) > limit:
        raise ManyhandsError(
            f"a message of {len(value):,} bytes is too large for the control connection, which carries up to "
            f"{limit:,}: return or exchange less, or write large results to a file"
        )
    return value


@final
class Connection:
    """One end: frames are queued to be sent and collected as they arrive; used by one thread."""

    def __init__(
        self, sock: socket.socket, limit: int = MAX_VALUE + OVERHEAD, macs: SessionMacs | None = None
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        _open.add(self)
        self._outgoing: deque[memoryview] = deque()
        self._head = b""
        self._body: bytearray | None = None
        self._length = 0
        self._broken = False  # after an invalid frame nothing more is read
        self._limit, self._macs = limit, macs

    def authenticate(self, macs: SessionMacs) -> None:
        """The handshake is done: from now on both ends add a tag to each frame."""
        self._limit, self._macs = MAX_VALUE + OVERHEAD, macs

    def fileno(self) -> int:
        """The socket's descriptor, for select and poll."""
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether queued frames have not been sent yet."""
        return bool(self._outgoing)

    def send(self, *message: Any) -> None:
        """Queue a message; `flush` sends it."""
        self.send_frame(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def send_frame(self, frame: bytes) -> None:
        """Queue raw bytes."""
        check_size(frame, OVERHEAD - TAG)
        tag = self._macs.outgoing.tag(frame) if self._macs else b""
        self._outgoing.append(memoryview(LENGTH.pack(len(tag) + len(frame)) + tag))
        self._outgoing.append(memoryview(frame))

    def flush(self) -> None:
        """Send what the socket accepts now."""
        while self._outgoing:
            try:
                sent = self._socket.send(self._outgoing[0])
            except BlockingIOError:
                return
            if sent == len(self._outgoing[0]):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = self._outgoing[0][sent:]

    def flush_for(self, seconds: float) -> None:
        """Send everything, or what can be sent in this time; a closed connection is no error."""
        until = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            self.flush()
            while self._outgoing and time.monotonic() < until:
                time.sleep(0.005)
                self.flush()

    def receive(self) -> list[memoryview]:
        """The complete frames that have arrived; EOFError if the connection is closed or a frame invalid."""
        frames: list[memoryview] = []
        for _ in range(_MAX_READS):
            try:
                frame = self._read()
            except BlockingIOError:
                break
            except (EOFError, OSError) as error:
                if frames:
                    break  # the next call raises
                raise EOFError from error
            if frame is not None:
                frames.append(frame)
        return frames

    def messages(self) -> list[tuple[Any, ...]]:
        """The frames that have arrived, unpickled: only for a peer that has proved itself."""
        return [pickle.loads(frame) for frame in self.receive()]  # noqa: S301 (after the handshake)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _read(self) -> memoryview | None:
        """Read once; the frame, if that completes one."""
        if self._broken:
            raise EOFError
        if self._body is None:
            self._head += self._recv(LENGTH.size - len(self._head))
            if len(self._head) < LENGTH.size:
                return None
            (self._length,) = LENGTH.unpack(self._head)
            self._broken = self._length > self._limit
            if self._broken:
                raise EOFError
            self._head, self._body = b"", bytearray()
        if len(self._body) < self._length:
            self._body += self._recv(min(_CHUNK, self._length - len(self._body)))
        if len(self._body) < self._length:
            return None
        frame, self._body = memoryview(self._body), None
        return self._verified(frame) if self._macs else frame

    def _recv(self, count: int) -> bytes:
        part = self._socket.recv(count)
        if not part:
            raise EOFError
        return part

    def _verified(self, frame: memoryview) -> memoryview:
        """The frame without its tag, if the tag is right."""
        assert self._macs is not None
        self._broken = not self._macs.incoming.is_next(frame[:TAG], frame[TAG:])
        if self._broken:
            raise EOFError
        return frame[TAG:]


def _close_in_forked_child() -> None:
    """A child, such as a data loader's process, must not hold open what its parent's death closes."""
    for connection in list(_open):
        connection.close()


if hasattr(os, "register_at_fork"):  # not on Windows, where processes are not forked
    os.register_at_fork(after_in_child=_close_in_forked_child)
