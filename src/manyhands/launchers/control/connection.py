"""Messages over a socket that never blocks, and the handshake by which its two ends trust each other.

    frame      8 bytes of length, then so many bytes: a pickled tuple; raw bytes during the handshake
    handshake  hub: nonce  ->  worker: HMAC(key, both nonces) + nonce'  ->  hub: HMAC(key, both nonces)
    sealed     after the handshake a frame begins with its tag (frame_mac.py), checked before it is read

Nothing is unpickled before the handshake is done, nor what was changed on its way. The two ends of a socket
pair need neither: nobody else has them. Nothing blocks, because whoever looks after a gang must not be held
up by a worker that was stopped in the middle of a message, nor by a stranger who is mute.
"""

from __future__ import annotations

import contextlib
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

from manyhands.core import addresses
from manyhands.core.errors import ManyhandsError
from manyhands.launchers.control.frame_mac import TAG, SealedSession, proof

LENGTH = struct.Struct("!Q")
NONCE = 32
STRANGER = 128  # bytes a frame may have before the handshake is done
LARGEST = 2**28  # bytes a value may have: words travel here, tensors by a transport
AROUND = 2**16  # bytes for the seal and the words around it
_CHUNK = 2**20  # bytes read at once: memory is taken for what has come, not for what was announced
_AT_ONCE = 64  # reads in a row, so that one busy worker does not starve the others


_open: weakref.WeakSet[Connection] = weakref.WeakSet()


class HandshakeError(ManyhandsError):
    """The other end is not one of ours."""


def check_size(value: bytes, more: int = 0) -> bytes:
    """Refuse a value that the other end would refuse; a frame may have some more bytes."""
    most = LARGEST + more
    if len(value) > most:
        raise ManyhandsError(
            f"a message of {len(value):,} bytes is too large for the line between workers and their leader, "
            f"which takes up to {most:,}: return or exchange less, and write large results to a file"
        )
    return value


@final
class Connection:
    """One end: frames are queued to go out and collected as they come in; used by one thread."""

    def __init__(
        self, sock: socket.socket, limit: int = LARGEST + AROUND, session: SealedSession | None = None
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        _open.add(self)
        self._out: deque[memoryview] = deque()
        self._head = b""
        self._body: bytearray | None = None
        self._length = 0
        self._broken = False  # nothing that comes after what was not ours is read
        self._limit, self._session = limit, session

    def trust(self, session: SealedSession) -> None:
        """The handshake is done: from now on both ends seal what they send."""
        self._limit, self._session = LARGEST + AROUND, session

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
        check_size(frame, AROUND - TAG)
        tag = self._session.outgoing.tag(frame) if self._session else b""
        self._out.append(memoryview(LENGTH.pack(len(tag) + len(frame)) + tag))
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

    def receive(self) -> list[memoryview]:
        """The frames that have come in whole; EOFError when no more will come, or what comes is not ours."""
        frames: list[memoryview] = []
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

    def _read(self) -> memoryview | None:
        """One read; the frame, when it completes one."""
        if self._broken:
            raise EOFError
        if self._body is None:
            self._head += self._some(LENGTH.size - len(self._head))
            if len(self._head) < LENGTH.size:
                return None
            (self._length,) = LENGTH.unpack(self._head)
            self._broken = self._length > self._limit
            if self._broken:
                raise EOFError
            self._head, self._body = b"", bytearray()
        if len(self._body) < self._length:
            self._body += self._some(min(_CHUNK, self._length - len(self._body)))
        if len(self._body) < self._length:
            return None
        whole, self._body = memoryview(self._body), None
        return self._opened(whole) if self._session else whole

    def _some(self, count: int) -> bytes:
        part = self._socket.recv(count)
        if not part:
            raise EOFError
        return part

    def _opened(self, sealed: memoryview) -> memoryview:
        """What is under the seal, if that is the other end's and this frame's."""
        assert self._session is not None
        self._broken = not self._session.incoming.is_next(sealed[:TAG], sealed[TAG:])
        if self._broken:
            raise EOFError
        return sealed[TAG:]


@final
class PendingConnection:
    """The hub's side of a handshake: `hear` says whether the other end has shown that it knows the key."""

    def __init__(self, sock: socket.socket, key: bytes, now: float) -> None:
        self.wire = Connection(sock, STRANGER)
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
        nonces = self._nonce + answer[-NONCE:]
        expected = proof(self._key, "worker", nonces)
        if len(frames) > 1 or not hmac.compare_digest(answer[:-NONCE], expected):
            raise EOFError
        self.wire.send_frame(proof(self._key, "hub", nonces))
        self.wire.trust(SealedSession.of("hub", self._key, nonces))
        return True


def connect(address: str, key: bytes, timeout: float = 5.0) -> Connection:
    """Connect to a hub and make sure that it is ours: OSError, or StrangerError."""
    until = time.monotonic() + timeout
    sock = _dial(address, timeout)
    try:
        nonce = os.urandom(NONCE)
        nonces = _receive(sock, until, NONCE) + nonce
        _send(sock, proof(key, "worker", nonces) + nonce)
        if not hmac.compare_digest(_receive(sock, until, TAG), proof(key, "hub", nonces)):
            raise HandshakeError(f"what answers at {address} does not know this gang's key")
    except EOFError:
        sock.close()
        raise HandshakeError(f"what answers at {address} is not the leader of this gang") from None
    except BaseException:
        sock.close()
        raise
    return Connection(sock, session=SealedSession.of("worker", key, nonces))


def listen(address: str | None = None) -> tuple[socket.socket, str]:
    """A listening socket, at this address only, and the address to find it by.

    Without one it is found on this host only, and leaves no file.
    """
    if address is None and sys.platform == "linux":
        sock = socket.socket(socket.AF_UNIX)
        address = f"@manyhands-{os.getpid()}-{secrets.token_hex(8)}"
        sock.bind("\0" + address[1:])  # an abstract name: it goes with the socket
        sock.listen(512)
    else:
        host, _, port = (address or "127.0.0.1:0").rpartition(":")
        sock = addresses.listener(host, int(port))
        address = f"{host}:{sock.getsockname()[1]}"
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


def _receive(sock: socket.socket, until: float, expected: int) -> bytes:
    (length,) = LENGTH.unpack(_exactly(sock, LENGTH.size, until))
    if length != expected:
        raise EOFError
    return _exactly(sock, length, until)


def _exactly(sock: socket.socket, count: int, until: float) -> bytes:
    """So many bytes in this time: a stranger who sends one now and then holds nobody up."""
    data = b""
    while len(data) < count:
        sock.settimeout(max(0.001, until - time.monotonic()))
        part = sock.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _forsake() -> None:
    """In a child forked by a data loader, say: it must not hold open what its parent's death closes."""
    for wire in list(_open):
        wire.close()


if hasattr(os, "register_at_fork"):  # where no process can be forked, none holds a wire open
    os.register_at_fork(after_in_child=_forsake)
