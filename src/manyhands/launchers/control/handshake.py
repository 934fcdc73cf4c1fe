"""How two processes that know the same key connect: listen, connect, and a handshake of both ends.

    server: nonce  ->  worker: HMAC(key, both nonces) + nonce'  ->  server: HMAC(key, both nonces)

The server's side never blocks; a worker waits for the server with a time limit.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from typing import final

from manyhands.core import addresses
from manyhands.core.errors import ManyhandsError
from manyhands.launchers.control.connection import LENGTH, Connection
from manyhands.launchers.control.frame_mac import TAG, SessionMacs, proof

NONCE = 32  # bytes
MAX_UNVERIFIED = 128  # bytes of a frame before the handshake is done
RETRY = 0.1  # seconds between attempts to connect


class HandshakeError(ManyhandsError):
    """The other end does not know the key, or is another program."""


@final
class ServerHandshake:
    """The server's side of a handshake that is going on."""

    def __init__(self, sock: socket.socket, key: bytes, now: float) -> None:
        self.connection = Connection(sock, MAX_UNVERIFIED)
        self.since = now
        self._key = key
        self._nonce = os.urandom(NONCE)
        self.connection.send_frame(self._nonce)
        with contextlib.suppress(OSError):  # already closed: the next read notices
            self.connection.flush()

    def advance(self) -> bool:
        """Read what has arrived; true once the peer has proved itself, EOFError if its proof is wrong."""
        frames = self.connection.receive()
        if not frames:
            return False
        answer = bytes(frames[0])
        nonces = self._nonce + answer[-NONCE:]
        expected = proof(self._key, "worker", nonces)
        if len(frames) > 1 or not hmac.compare_digest(answer[:-NONCE], expected):
            raise EOFError
        self.connection.send_frame(proof(self._key, "server", nonces))
        self.connection.authenticate(SessionMacs.of("server", self._key, nonces))
        return True


def connect(address: str, key: bytes, timeout: float = 5.0) -> Connection:
    """Connect to a server and check that it knows the key: OSError or HandshakeError if not."""
    until = time.monotonic() + timeout
    sock = _dial(address, timeout)
    try:
        nonce = os.urandom(NONCE)
        nonces = _receive(sock, until, NONCE) + nonce
        _send(sock, proof(key, "worker", nonces) + nonce)
        if not hmac.compare_digest(_receive(sock, until, TAG), proof(key, "server", nonces)):
            raise HandshakeError(f"the process that answers at {address} does not know the key of this run")
    except EOFError:
        sock.close()
        raise HandshakeError(f"the process that answers at {address} is not the leader of this run") from None
    except BaseException:
        sock.close()
        raise
    return Connection(sock, macs=SessionMacs.of("worker", key, nonces))


def connect_with_retries(address: str, key: bytes, seconds: float) -> Connection:
    """Connect to a server that may not listen yet; ManyhandsError after this time."""
    return connect_when_found(
        lambda: (address, key),
        seconds,
        f"the leader of this run did not answer at {address.removeprefix('@')}",
    )


def connect_when_found(
    find: Callable[[], tuple[str, bytes] | None], seconds: float, complaint: str
) -> Connection:
    """Connect to the address and key that `find` returns; it is called before each attempt.

    What it finds may be left from a run that was killed, and be replaced by the right one later.
    """
    until = time.monotonic() + seconds
    while True:
        reason = ""
        try:
            if (found := find()) is not None:
                return connect(*found)
        except (OSError, HandshakeError) as error:
            reason = f": {error}"
        if time.monotonic() > until:
            raise ManyhandsError(f"{complaint} within {seconds:g} s{reason}")
        time.sleep(RETRY)


def listen(address: str | None = None) -> tuple[socket.socket, str]:
    """A socket that listens at this address only, and the address by which to connect to it.

    Without an address it can be reached from this host only, and leaves no file.
    """
    if address is None and sys.platform == "linux":
        sock = socket.socket(socket.AF_UNIX)
        address = f"@manyhands-{os.getpid()}-{secrets.token_hex(8)}"
        sock.bind("\0" + address[1:])  # an abstract name: it disappears with the socket
        sock.listen(512)
    else:
        host, _, port = (address or "127.0.0.1:0").rpartition(":")
        sock = addresses.listener(host, int(port))
        address = f"{host}:{sock.getsockname()[1]}"
    sock.setblocking(False)
    return sock, address


def tune(sock: socket.socket) -> None:
    """For TCP: send small messages at once, and notice a host that is gone."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)


def new_key() -> bytes:
    """A random key for one run."""
    return os.urandom(32)


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
    (length,) = LENGTH.unpack(_receive_exactly(sock, LENGTH.size, until))
    if length != expected:
        raise EOFError
    return _receive_exactly(sock, length, until)


def _receive_exactly(sock: socket.socket, count: int, until: float) -> bytes:
    """Receive `count` bytes before a deadline, also from a peer that sends one byte at a time."""
    data = b""
    while len(data) < count:
        sock.settimeout(max(0.001, until - time.monotonic()))
        part = sock.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data
