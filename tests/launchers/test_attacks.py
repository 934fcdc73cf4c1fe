"""Without the key no code can be run: by an unknown process, or by a proxy in the middle of a connection."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launchers.test_control_server import KEY, Later, _closed, in_thread, poll_until
from manyhands.core.errors import WorkerFailedError
from manyhands.launchers.control.connection import Connection
from manyhands.launchers.control.handshake import HandshakeError, connect
from manyhands.launchers.control.server import ControlServer
from manyhands.launchers.env.leader import EnvLeader
from manyhands.launchers.env.rendezvous import detect

LENGTH = struct.Struct("!Q")


class Evil:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self._path,)


def guessable(job: str) -> bytes:
    """The key that the first version used under torchrun: every user can compute it."""
    return hashlib.sha256(f"manyhands:{job}:{os.getuid()}".encode()).digest()


def attack(address: str, key: bytes, evil: Path) -> None:
    """Try to connect as a worker, and send a pickle that runs code."""
    try:
        connection = connect(address, key, 1.0)
    except (OSError, HandshakeError):
        return
    connection.send("hello", 1, "h", Evil(evil))
    connection.flush_for(1.0)
    connection.close()


def test_the_key_of_a_torchrun_job_cannot_be_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D1: run id, address, port and user are no secrets; `LOCAL_WORLD_SIZE` says that all are on one host."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port - 1}", "TORCHELASTIC_RUN_ID": "none"}
    cluster = detect(environ | {"TORCHELASTIC_RESTART_COUNT": "0"})
    assert cluster is not None
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    evil = tmp_path / "evil"
    keys = [guessable(f"none:0:127.0.0.1:{port}"), b"", bytes(32), hashlib.sha256(b"manyhands:").digest()]
    leader = EnvLeader(cluster)
    try:
        attacks = [
            in_thread(partial(attack, where, key, evil))
            for where in {f"127.0.0.1:{port}", leader.address}
            for key in keys
        ]
        with pytest.raises(WorkerFailedError, match=r"^worker 1 of 2 did not start within 0.5 s"):
            leader.executor(1, 0.5)
        for each in attacks:
            each.join(5)
        assert not evil.exists(), "an attacker's pickle was loaded"
    finally:
        leader._close()


@pytest.mark.parametrize("echo", [False, True], ids=["pickle first", "nonce sent back"])
def test_nothing_is_unpickled_before_the_handshake(echo: bool, tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    frame = pickle.dumps(("hello", 1, "h", Evil(evil)))
    with ControlServer() as server:
        host, _, port = server.listen(KEY, "127.0.0.1:0").rpartition(":")
        with socket.create_connection((host, int(port))) as sock:
            greeting = Later(exactly, sock, 40)
            poll_until(server, greeting.is_done)
            sock.sendall(framed(2 * greeting.value[8:] if echo else frame) + framed(frame))
            poll_until(server, lambda seen: _closed(sock))
        assert server.connected == set()
    assert not evil.exists()


class Proxy:
    """A proxy between a worker and its server, which passes the handshake on and then attacks."""

    def __init__(
        self, server: str, to_server: bool, attack_frames: Callable[[list[bytes]], list[bytes]]
    ) -> None:
        self._server_address, self._attack = server, attack_frames
        self._handshake = {True: 1 + to_server, False: 2}  # frames by direction; `hello` is let through, too
        self._attacked = to_server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        in_thread(self._run)

    def _run(self) -> None:
        worker, _ = self._listener.accept()
        host, _, port = self._server_address.rpartition(":")
        server = socket.create_connection((host, int(port)))
        ways = ((worker, server, True), (server, worker, False))
        pair = [in_thread(partial(self._pass, *way)) for way in ways]
        for thread in pair:
            thread.join()
        self._listener.close()

    def _pass(self, source: socket.socket, target: socket.socket, to_server: bool) -> None:
        with contextlib.suppress(OSError):  # the attack was noticed
            for _ in range(self._handshake[to_server]):
                target.sendall(read_frame(source))
            if to_server == self._attacked:
                for frame in self._attack([read_frame(source), read_frame(source)]):
                    target.sendall(frame)
            while data := source.recv(65536):
                target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def read_frame(sock: socket.socket) -> bytes:
    """One frame with its length."""
    head = exactly(sock, LENGTH.size)
    return head + exactly(sock, LENGTH.unpack(head)[0])


def exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise OSError("closed")
        data += part
    return data


def framed(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


def forge(evil: Path, prefix: bytes | None) -> Callable[[list[bytes]], list[bytes]]:
    """Replace the first frame by another pickle: without a tag, with zeros, or with the frame's own tag."""
    body = pickle.dumps(("stop", Evil(evil)))
    return lambda frames: [framed((frames[0][8:40] if prefix is None else prefix) + body), frames[1]]


ATTACKS: dict[str, tuple[Callable[[list[bytes]], list[bytes]], list[int]]] = {
    "flip": (lambda frames: [frames[0][:-4] + bytes([frames[0][-4] ^ 1]) + frames[0][-3:], frames[1]], []),
    "replay": (lambda frames: [frames[0], frames[0], frames[1]], [1]),
    "reorder": (lambda frames: frames[::-1], []),
    "drop": (lambda frames: [frames[1]], []),
    "huge": (lambda frames: [LENGTH.pack(2**40) + b"x" * 1000], []),
}


@pytest.fixture
def server() -> Iterator[ControlServer]:
    with ControlServer() as made:
        yield made


def connected(server: ControlServer, address: str) -> Connection:
    connecting = Later(connect, address, KEY)
    poll_until(server, connecting.is_done)
    connection: Connection = connecting.value
    connection.send("hello", 3, "h", 42)
    connection.flush()
    poll_until(server, lambda seen: server.connected == {3})
    return connection


def received_by_the_server(server: ControlServer, connection: Connection) -> list[int]:
    for number in (1, 2):
        connection.send("stop", number)
    connection.flush()
    events = poll_until(server, lambda seen: any(event.kind == "lost" for event in seen), 3)
    return [event.content[0] for event in events if event.kind == "stop"]


def received_by_the_worker(server: ControlServer, connection: Connection) -> list[int]:
    for number in (1, 2):
        server.send(3, "stop", number)
    received: list[int] = []
    until = time.monotonic() + 3
    while time.monotonic() < until:
        try:
            received += [content for _, content in connection.messages()]
        except EOFError:
            return received
        server.poll(0.01)
    raise AssertionError(f"the connection was not dropped, and {received} was received")


@pytest.mark.parametrize("to_server", [True, False], ids=["to server", "to worker"])
@pytest.mark.parametrize("name", ["bare", "zeros", "tagged", *ATTACKS])
def test_an_attack_on_a_connection_ends_it(
    server: ControlServer, name: str, to_server: bool, tmp_path: Path
) -> None:
    evil = tmp_path / "evil"
    forgeries = {"bare": b"", "zeros": bytes(32), "tagged": None}
    attack_frames, expected = (forge(evil, forgeries[name]), []) if name in forgeries else ATTACKS[name]
    proxy = Proxy(server.listen(KEY, "127.0.0.1:0"), to_server, attack_frames)
    connection = connected(server, proxy.address)
    received = (
        received_by_the_server(server, connection)
        if to_server
        else received_by_the_worker(server, connection)
    )
    connection.close()
    assert not evil.exists(), "a forged pickle was loaded"
    assert received == expected


def test_a_proxy_that_changes_nothing_is_not_noticed(server: ControlServer) -> None:
    """The baseline of the attacks; and no two connections have the same tags."""
    frames: list[list[bytes]] = []
    for _ in range(2):

        def keep(these: list[bytes]) -> list[bytes]:
            frames.append(these)
            return these

        proxy = Proxy(server.listen(KEY, "127.0.0.1:0"), True, keep)
        connection = connected(server, proxy.address)
        for number in (1, 2):
            connection.send("stop", number)
        connection.flush()
        events = poll_until(server, lambda seen: len(seen) == 2)
        assert [event.content for event in events] == [(1,), (2,)]
        connection.close()
        poll_until(server, lambda seen: any(event.kind == "lost" for event in seen))
        server.stop_listening()
    assert frames[0][0] != frames[1][0]
