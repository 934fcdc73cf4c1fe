"""Messages over a socket that never blocks, and the handshake by which its two ends trust each other.

    frame      8 bytes of length, then so many bytes: a pickled tuple; raw bytes during the handshake
    handshake  hub: nonce  ->  worker: HMAC(key, nonce) + nonce'  ->  hub: HMAC(key, nonce')

Nothing is unpickled before the handshake is done. Nothing blocks, because whoever looks after a gang must not
be held up by a worker that was stopped in the middle of a message, nor by a stranger who is mute.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import pickle
import secrets
import socket
import struct
import sys
import time
import weakref
from collections import deque
from typing import Any, final

from manyhands.errors import ManyhandsError

LENGTH = struct.Struct("!Q")
NONCE = 32
STRANGER = 128  # bytes a frame may have before the handshake is done
_AT_ONCE = 64  # reads in a row, so that one busy worker does not starve the others


_open: weakref.WeakSet[Wire] = weakref.WeakSet()


class StrangerError(ManyhandsError):
    """The other end is not one of ours."""


@final
class Wire:
    """One end: frames are queued to go out and collected as they come in; used by one thread."""

    def __init__(self, sock: socket.socket, limit: int | None = None) -> None:
        sock.setblocking(False)
        self._socket = sock
        _open.add(self)
        self._out: deque[memoryview] = deque()
        self._head = b""
        self._body: bytearray | None = None
        self._filled = 0
        self.limit = limit

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether something waits to go out."""
        return bool(self._out)

    def send(self, *message: Any) -> None:
        """Queue a message; `flush` sends it."""
        self.send_frame(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def send_frame(self, frame: bytes) -> None:
        """Queue raw bytes."""
        self._out.append(memoryview(LENGTH.pack(len(frame))))
        self._out.append(memoryview(frame))

    def flush(self) -> None:
        """Send what the socket takes now."""
        while self._out:
            try:
                sent = self._socket.send(self._out[0])
            except BlockingIOError:
                return
            if sent == len(self._out[0]):
                self._out.popleft()
            else:
                self._out[0] = self._out[0][sent:]

    def flush_for(self, seconds: float) -> None:
        """Send everything, or what can be sent in this time; a connection that is gone is no error."""
        until = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            self.flush()
            while self._out and time.monotonic() < until:
                time.sleep(0.005)
                self.flush()

    def receive(self) -> list[bytearray]:
        """The frames that have come in whole; EOFError when no more will come."""
        frames: list[bytearray] = []
        for _ in range(_AT_ONCE):
            try:
                finished = self._read()
            except BlockingIOError:
                break
            except (EOFError, OSError) as error:
                if frames:
                    break  # the end is still there the next time
                raise EOFError from error
            if finished is not None:
                frames.append(finished)
        return frames

    def messages(self) -> list[tuple[Any, ...]]:
        """The same, unpickled: only for an end that is known to be ours."""
        return [pickle.loads(frame) for frame in self.receive()]  # noqa: S301 (after the handshake)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _read(self) -> bytearray | None:
        """One read; the frame, when it completes one."""
        if self._body is None:
            part = self._socket.recv(LENGTH.size - len(self._head))
            if not part:
                raise EOFError
            self._head += part
            if len(self._head) < LENGTH.size:
                return None
            (length,) = LENGTH.unpack(self._head)
            if self.limit is not None and length > self.limit:
                raise EOFError
            self._head, self._body, self._filled = b"", bytearray(length), 0
        if self._filled < len(self._body):
            count = self._socket.recv_into(memoryview(self._body)[self._filled :])
            if count == 0:
                raise EOFError
            self._filled += count
        if self._filled < len(self._body):
            return None
        whole, self._body = self._body, None
        return whole


@final
class Stranger:
    """The hub's side of a handshake: `hear` says whether the other end has shown that it knows the key."""

    def __init__(self, sock: socket.socket, key: bytes, now: float) -> None:
        self.wire = Wire(sock, STRANGER)
        self.since = now
        self._key = key
        self._nonce = os.urandom(NONCE)
        self.wire.send_frame(self._nonce)
        with contextlib.suppress(OSError):  # already gone: the next read says so
            self.wire.flush()

    def hear(self) -> bool:
        """Read what has come; EOFError when it is no answer of ours."""
        frames = self.wire.receive()
        if not frames:
            return False
        answer = bytes(frames[0])
        if not hmac.compare_digest(answer[:-NONCE], proof(self._key, b"worker", self._nonce)):
            raise EOFError
        self.wire.limit = None
        self.wire.send_frame(proof(self._key, b"hub", answer[-NONCE:]))
        return True


def connect(address: str, key: bytes, timeout: float = 5.0) -> Wire:
    """Connect to a hub and make sure that it is ours: OSError, or StrangerError."""
    sock = _dial(address, timeout)
    try:
        nonce = os.urandom(NONCE)
        _send(sock, proof(key, b"worker", _receive(sock)) + nonce)
        if not hmac.compare_digest(_receive(sock), proof(key, b"hub", nonce)):
            raise StrangerError(f"what answers at {address} does not know this gang's key")
    except EOFError:
        sock.close()
        raise StrangerError(f"what answers at {address} is not the leader of this gang") from None
    except BaseException:
        sock.close()
        raise
    return Wire(sock)


def listen(address: str | None = None) -> tuple[socket.socket, str]:
    """A listening socket and the address to find it by; without one, on this host only, leaving no file."""
    if address is None and sys.platform == "linux":
        sock = socket.socket(socket.AF_UNIX)
        address = f"@manyhands-{os.getpid()}-{secrets.token_hex(8)}"
        sock.bind("\0" + address[1:])  # an abstract name: it goes with the socket
    else:
        host, _, port = (address or "127.0.0.1:0").rpartition(":")
        family, _, _, _, where = socket.getaddrinfo(
            host or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(where)
        except OSError:
            sock.close()
            raise
        address = f"{host or socket.gethostname()}:{sock.getsockname()[1]}"
    sock.listen(512)
    sock.setblocking(False)
    return sock, address


def tune(sock: socket.socket) -> None:
    """Between hosts: small messages go at once, and a host that is gone is noticed."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)


def proof(key: bytes, role: bytes, nonce: bytes) -> bytes:
    """What only someone with the key can say about a nonce; the roles keep it from being said back."""
    return hmac.new(key, role + nonce, hashlib.sha256).digest()


def _dial(address: str, timeout: float) -> socket.socket:
    if address.startswith("@"):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(timeout)
        try:
            sock.connect("\0" + address[1:])
        except BaseException:
            sock.close()
            raise
        return sock
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout)
    tune(sock)
    return sock


def _send(sock: socket.socket, frame: bytes) -> None:
    sock.sendall(LENGTH.pack(len(frame)) + frame)


def _receive(sock: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(_exactly(sock, LENGTH.size))
    if length > STRANGER:
        raise EOFError
    return _exactly(sock, length)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _forsake() -> None:
    """In a child forked by a data loader, say: it must not hold open what its parent's death closes."""
    for wire in list(_open):
        wire.close()


os.register_at_fork(after_in_child=_forsake)
