"""Whoever does not know the key runs nothing here: strangers, and someone in the middle of a connection."""

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
from manyhands.launchers.control.connection import Connection, HandshakeError, connect
from manyhands.launchers.control.server import ControlServer
from manyhands.launchers.env.leader import EnvLeader
from manyhands.launchers.env.rendezvous import detect

LENGTH = struct.Struct("!Q")


class Evil:
    """Who unpickles this makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self._path,)


def guessable(job: str) -> bytes:
    """The key that the first version used under torchrun: anybody can make it."""
    return hashlib.sha256(f"manyhands:{job}:{os.getuid()}".encode()).digest()


def attack(address: str, key: bytes, evil: Path) -> None:
    """Try to be a worker, and send what would run."""
    try:
        wire = connect(address, key, 1.0)
    except (OSError, HandshakeError):
        return
    wire.send("hello", 1, "h", Evil(evil))
    wire.flush_for(1.0)
    wire.close()


def test_the_key_of_a_torchrun_job_cannot_be_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D1: run id, address, port and user are no secrets; `LOCAL_WORLD_SIZE` says that all are on one host."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port - 1}", "TORCHELASTIC_RUN_ID": "none"}
    found = detect(environ | {"TORCHELASTIC_RESTART_COUNT": "0"})
    assert found is not None
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    evil = tmp_path / "evil"
    keys = [guessable(f"none:0:127.0.0.1:{port}"), b"", bytes(32), hashlib.sha256(b"manyhands:").digest()]
    leader = EnvLeader(found)
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
        assert not evil.exists(), "a stranger's pickle was loaded"
    finally:
        leader._close()


@pytest.mark.parametrize("echo", [False, True], ids=["pickle first", "nonce sent back"])
def test_nothing_is_unpickled_before_the_handshake(echo: bool, tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    frame = pickle.dumps(("hello", 1, "h", Evil(evil)))
    with ControlServer() as hub:
        host, _, port = hub.listen(KEY, "127.0.0.1:0").rpartition(":")
        with socket.create_connection((host, int(port))) as sock:
            greeting = Later(exactly, sock, 40)
            poll_until(hub, greeting.is_done)
            sock.sendall(framed(2 * greeting.value[8:] if echo else frame) + framed(frame))
            poll_until(hub, lambda seen: _closed(sock))
        assert hub.ranks == set()
    assert not evil.exists()


class Middle:
    """A proxy between a worker and its hub, which lets the handshake through and then does its deed."""

    def __init__(self, hub: str, to_hub: bool, deed: Callable[[list[bytes]], list[bytes]]) -> None:
        self._hub, self._deed = hub, deed
        self._handshake = {True: 1 + to_hub, False: 2}  # frames by direction; `hello` is let through, too
        self._attacked = to_hub
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        in_thread(self._run)

    def _run(self) -> None:
        worker, _ = self._server.accept()
        host, _, port = self._hub.rpartition(":")
        hub = socket.create_connection((host, int(port)))
        ways = ((worker, hub, True), (hub, worker, False))
        pair = [in_thread(partial(self._pass, *way)) for way in ways]
        for thread in pair:
            thread.join()
        self._server.close()

    def _pass(self, source: socket.socket, target: socket.socket, to_hub: bool) -> None:
        with contextlib.suppress(OSError):  # it was noticed
            for _ in range(self._handshake[to_hub]):
                target.sendall(whole(source))
            if to_hub == self._attacked:
                for frame in self._deed([whole(source), whole(source)]):
                    target.sendall(frame)
            while data := source.recv(65536):
                target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def whole(sock: socket.socket) -> bytes:
    """A frame with its length."""
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
    """Another pickle in place of the first frame, bare or behind a tag: of zeros, or the frame's own."""
    body = pickle.dumps(("stop", Evil(evil)))
    return lambda frames: [framed((frames[0][8:40] if prefix is None else prefix) + body), frames[1]]


DEEDS: dict[str, tuple[Callable[[list[bytes]], list[bytes]], list[int]]] = {
    "flip": (lambda frames: [frames[0][:-4] + bytes([frames[0][-4] ^ 1]) + frames[0][-3:], frames[1]], []),
    "replay": (lambda frames: [frames[0], frames[0], frames[1]], [1]),
    "reorder": (lambda frames: frames[::-1], []),
    "drop": (lambda frames: [frames[1]], []),
    "huge": (lambda frames: [LENGTH.pack(2**40) + b"x" * 1000], []),
}


@pytest.fixture
def hub() -> Iterator[ControlServer]:
    with ControlServer() as made:
        yield made


def linked(hub: ControlServer, address: str) -> Connection:
    connecting = Later(connect, address, KEY)
    poll_until(hub, connecting.is_done)
    wire: Connection = connecting.value
    wire.send("hello", 3, "h", 42)
    wire.flush()
    poll_until(hub, lambda seen: hub.ranks == {3})
    return wire


def heard_by_the_hub(hub: ControlServer, wire: Connection) -> list[int]:
    for number in (1, 2):
        wire.send("stop", number)
    wire.flush()
    events = poll_until(hub, lambda seen: any(event.kind == "lost" for event in seen), 3)
    return [event.content[0] for event in events if event.kind == "stop"]


def heard_by_the_worker(hub: ControlServer, wire: Connection) -> list[int]:
    for number in (1, 2):
        hub.send(3, "stop", number)
    heard: list[int] = []
    until = time.monotonic() + 3
    while time.monotonic() < until:
        try:
            heard += [content for _, content in wire.messages()]
        except EOFError:
            return heard
        hub.poll(0.01)
    raise AssertionError(f"the connection was not dropped, and {heard} was heard")


@pytest.mark.parametrize("to_hub", [True, False], ids=["to hub", "to worker"])
@pytest.mark.parametrize("name", ["bare", "zeros", "tagged", *DEEDS])
def test_what_is_changed_on_its_way_ends_the_connection(
    hub: ControlServer, name: str, to_hub: bool, tmp_path: Path
) -> None:
    evil = tmp_path / "evil"
    forgeries = {"bare": b"", "zeros": bytes(32), "tagged": None}
    deed, expected = (forge(evil, forgeries[name]), []) if name in forgeries else DEEDS[name]
    middle = Middle(hub.listen(KEY, "127.0.0.1:0"), to_hub, deed)
    wire = linked(hub, middle.address)
    heard = heard_by_the_hub(hub, wire) if to_hub else heard_by_the_worker(hub, wire)
    wire.close()
    assert not evil.exists(), "a forged pickle was loaded"
    assert heard == expected


def test_a_proxy_that_changes_nothing_is_not_noticed(hub: ControlServer) -> None:
    """What the deeds are judged by; and no two connections have the same seals."""
    frames: list[list[bytes]] = []
    for _ in range(2):

        def keep(these: list[bytes]) -> list[bytes]:
            frames.append(these)
            return these

        middle = Middle(hub.listen(KEY, "127.0.0.1:0"), True, keep)
        wire = linked(hub, middle.address)
        for number in (1, 2):
            wire.send("stop", number)
        wire.flush()
        events = poll_until(hub, lambda seen: len(seen) == 2)
        assert [event.content for event in events] == [(1,), (2,)]
        wire.close()
        poll_until(hub, lambda seen: any(event.kind == "lost" for event in seen))
        hub.close_door()
    assert frames[0][0] != frames[1][0]
