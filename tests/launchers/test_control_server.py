"""Control server and client: unknown processes are refused, nothing blocks, messages arrive."""

from __future__ import annotations

import os
import pickle
import re
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import manyhands
from manyhands.core.errors import ManyhandsError
from manyhands.core.rank_info import RankStatus, ignore
from manyhands.launchers.control import connection as connection_module
from manyhands.launchers.control import server as server_module
from manyhands.launchers.control.client import Call, ControlClient
from manyhands.launchers.control.code_position import is_waiting
from manyhands.launchers.control.connection import Connection
from manyhands.launchers.control.handshake import HandshakeError, connect
from manyhands.launchers.control.remote_calls import CallResult, pack, perform
from manyhands.launchers.control.server import ControlEvent, ControlServer

KEY = b"k" * 32


@pytest.fixture
def server() -> Iterator[ControlServer]:
    with ControlServer() as made:
        yield made


def poll_until(
    server: ControlServer, done: Callable[[list[ControlEvent]], bool], seconds: float = 10
) -> list[ControlEvent]:
    """All events until a condition holds; every single poll is short."""
    events: list[ControlEvent] = []
    until = time.monotonic() + seconds
    while not done(events):
        assert time.monotonic() < until, events
        started = time.monotonic()
        events += server.poll(0.05)
        assert time.monotonic() - started < 5
    return events


def any_at_all(events: list[ControlEvent]) -> bool:
    return bool(events)


def in_thread(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("address", [None, "127.0.0.1:0"], ids=["abstract", "tcp"])
def test_unknown_processes_are_refused_and_block_nothing(
    server: ControlServer, address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE", 0.3)
    found = server.listen(KEY, address)
    refused: list[Exception] = []

    def with_the_wrong_key() -> None:
        try:
            connect(found, b"x" * 32)
        except (HandshakeError, OSError) as error:
            refused.append(error)

    def dial() -> socket.socket:
        if found.startswith("@"):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect("\0" + found[1:])
            return sock
        host, _, port = found.rpartition(":")
        return socket.create_connection((host, int(port)))

    silent, half, huge, noise = dial(), dial(), dial(), dial()
    half.sendall(b"\0\0")  # a part of a length
    huge.sendall(b"\xff" * 8)  # 16 exabytes follow
    noise.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
    wrong = in_thread(with_the_wrong_key)
    ours: list[Connection] = []

    def with_the_right_key() -> None:
        connection = connect(found, KEY)
        connection.send("hello", 3, "h", 42)
        connection.flush()
        ours.append(connection)

    in_thread(with_the_right_key)
    events = poll_until(server, any_at_all)
    assert events == [ControlEvent(3, "hello", ("h", 42))]
    assert server.connected == {3}
    poll_until(server, lambda seen: not wrong.is_alive())
    assert len(refused) == 1
    for sock in (silent, half, huge, noise):  # after a while all of them are closed
        sock.settimeout(5)
        poll_until(server, lambda seen, sock=sock: _closed(sock))  # type: ignore[misc]
        sock.close()
    ours[0].close()
    assert poll_until(server, any_at_all) == [ControlEvent(3, "lost")]


def _closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def test_a_server_without_descriptors_does_not_spin(server: ControlServer) -> None:
    """D15: a waiting connection keeps the listener readable, and `poll` returned at once, again and again."""
    address = server.listen(KEY)
    waiting = [socket.socket(socket.AF_UNIX) for _ in range(4)]
    for sock in waiting:
        sock.connect("\0" + address[1:])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as highest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest.fileno(), hard))
    try:
        polls, until = 0, time.monotonic() + 0.4
        while time.monotonic() < until:
            server.poll(0.1)
            polls += 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert polls < 20
    connecting = Later(connect, address, KEY)
    poll_until(server, connecting.is_done)  # it accepts again
    server.stop_listening()
    for sock in waiting:
        sock.close()


def test_many_unknown_processes_do_not_keep_workers_out(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D15: there is a limit, and the oldest handshake is dropped."""
    monkeypatch.setattr(server_module, "MAX_HANDSHAKES", 3)
    address = server.listen(KEY)
    others = []
    for _ in range(6):
        others.append(socket.socket(socket.AF_UNIX))
        others[-1].connect("\0" + address[1:])
        server.poll(0.1)
    poll_until(server, lambda seen: _closed(others[2]), 3)
    assert [_closed(sock) for sock in others] == [True] * 3 + [False] * 3
    connecting = Later(connect, address, KEY)
    poll_until(server, connecting.is_done)
    for sock in others:
        sock.close()


def test_a_server_that_is_not_ours_is_recognized() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        in_thread(greet)
        port = server.getsockname()[1]
        with pytest.raises(
            HandshakeError, match=rf"^the process that answers at 127.0.0.1:{port} is not the leader"
        ):
            connect(f"127.0.0.1:{port}", KEY)


def test_a_server_that_stopped_listening_refuses_connections(server: ControlServer) -> None:
    address = server.listen(KEY)
    server.stop_listening()
    with pytest.raises(OSError, match="refused"):
        connect(address, KEY)


def test_a_worker_stopped_in_the_middle_of_a_message_blocks_nothing(server: ControlServer) -> None:
    ours, theirs = socket.socketpair()
    server.adopt(ours)
    connection = Connection(theirs)
    connection.send("hello", 0, "h", 1)
    connection.send("result", 1, b"x" * 50_000_000)
    connection.flush()  # what the socket takes: a small part
    assert connection.pending
    events = poll_until(server, any_at_all)
    assert [event.kind for event in events] == ["hello"]
    server.send(0, "call", 1, None, b"y" * 50_000_000)  # it does not read, either
    for _ in range(3):
        assert server.poll(0.01) == []
    connection.close()


def client_of(server: ControlServer, rank: int = 0, **more: Any) -> ControlClient:
    ours, theirs = socket.socketpair()
    server.adopt(ours)
    return ControlClient(Connection(theirs), rank, "here", **more)


def test_messages_come_before_the_result(server: ControlServer) -> None:
    client = client_of(server)
    poll_until(server, any_at_all)
    server.send(0, "call", 7, None, b"payload")
    poll_until(server, lambda seen: not client.orders.empty(), 5)
    assert client.next_call() == Call(7, None, b"payload")
    client.watch(lambda: RankStatus(3, "forward", "", 9))
    for number in range(1000):
        client.tell(number)
    client.answer(CallResult(b"done"))
    events = poll_until(server, lambda seen: any(event.kind == "result" for event in seen))
    assert events[-1] == ControlEvent(0, "result", (7, CallResult(b"done")))
    messages = [message for event in events if event.kind == "report" for message in event.content[2]]
    assert len(messages) == 1000
    statuses = {event.content[1] for event in events if event.kind == "report"}
    assert RankStatus(3, "forward", "", 9) in statuses
    client.close()


def test_orders_arrive(server: ControlServer) -> None:
    endings: list[tuple[int, bool]] = []
    client = client_of(server, on_end=lambda code, lost: endings.append((code, lost)))
    poll_until(server, any_at_all)
    server.send_all("stop", 15)
    poll_until(server, lambda seen: client.stop == 15)
    server.send_all("position")
    (event,) = [
        e
        for e in poll_until(server, lambda seen: any(e.kind == "position" for e in seen))
        if e.kind == "position"
    ]
    assert "test_orders_arrive" in event.content[0].stack
    assert not event.content[0].waiting
    server.send_all("abort", 4)
    poll_until(server, lambda seen: endings == [(4, False)])
    server.close()
    until = time.monotonic() + 5
    while len(endings) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert endings[1:] == [(1, True)]  # the server is gone


def test_a_forked_child_does_not_hold_the_connection_open(server: ControlServer) -> None:
    """A data loader's processes outlive a killed worker for seconds: the server must notice at once."""
    ours, theirs = socket.socketpair()
    server.adopt(ours)
    worker = os.fork()
    if worker == 0:  # a worker, which forks a child that stays
        try:
            ours.close()
            connection = Connection(theirs)
            connection.send("hello", 0, "h", os.getpid())
            connection.flush()
            if os.fork() == 0:
                time.sleep(3)
        finally:
            os._exit(0)
    theirs.close()
    started = time.monotonic()
    poll_until(server, lambda seen: any(event.kind == "lost" for event in seen))
    assert time.monotonic() - started < 2
    os.waitpid(worker, 0)


def called(server: ControlServer, size: int) -> list[ControlClient]:
    """The clients of this many workers, in a call."""
    server.start_call(size)
    clients = [client_of(server, rank, on_end=ignore) for rank in range(size)]
    poll_until(server, lambda seen: len(server.connected) == size)
    server.send_all("call", 1, ("here",) * size, b"")
    poll_until(server, lambda seen: not any(client.orders.empty() for client in clients))
    assert [client.next_call() for client in clients] == [Call(1, ("here",) * size, b"")] * size
    return clients


class Later:
    """A call in a thread, such as an exchange, which waits for others."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._values: list[Any] = []
        in_thread(lambda: self._values.append(call(*arguments)))

    def is_done(self, seen: object = None) -> bool:
        return bool(self._values)

    @property
    def value(self) -> Any:
        return self._values[0]


def test_an_exchange_completes_without_a_worker_that_is_gone(server: ControlServer) -> None:
    """Whether it had sent its value or not: no worker gets it, and all know by then that it is gone."""
    clients = called(server, 4)
    waiting = [Later(clients[rank].exchange, rank) for rank in (0, 2, 3)]
    poll_until(server, lambda seen: len(server._exchanges.get((1, 1), {})) == 3)
    server.mark_gone(3)
    assert not waiting[0].is_done()
    server.mark_gone(1)
    poll_until(server, lambda seen: all(one.is_done() for one in waiting))
    assert [one.value for one in waiting] == [[0, None, 2, None]] * 3
    assert clients[0].gone == clients[2].gone == {1, 3}
    again = [Later(clients[rank].exchange, 10 * rank) for rank in (0, 2)]
    poll_until(server, lambda seen: all(one.is_done() for one in again))
    assert [one.value for one in again] == [[0, None, 20, None]] * 2
    server.start_call(4)
    assert server.gone == frozenset()


def test_a_replacement_takes_part_in_the_current_exchange(server: ControlServer) -> None:
    clients = called(server, 3)
    clients[2].post("address", ("here", 1))
    clients[2].post("life", 1)
    poll_until(server, lambda seen: len(server.posted) == 2)
    clients[1].post("life", 2)  # the latest value counts
    poll_until(server, lambda seen: server.posted["life"] == pickle.dumps(2, pickle.HIGHEST_PROTOCOL))
    server.disconnect(2)
    server.mark_gone(2)
    server.mark_gone(2)
    for _ in range(3):
        pair = [Later(client.exchange, "x") for client in clients[:2]]
        poll_until(server, lambda seen, pair=pair: all(one.is_done() for one in pair))  # type: ignore[misc]
    new = client_of(server, 2, on_end=ignore)
    poll_until(server, lambda seen: server.connected == {0, 1, 2})
    server.send(2, "call", 1, ("here",) * 3, b"", None, server.gone | {0}, server.posted)
    poll_until(server, lambda seen: not new.orders.empty())
    call = new.next_call()
    assert isinstance(call, Call)
    assert call.joining
    assert new.posted == {"address": ("here", 1), "life": 2}
    assert new.gone == {0}  # never its own rank
    with pytest.raises(AssertionError, match="calls `joined` before its first exchange"):
        new.exchange(None)
    early = Later(clients[0].exchange, 0)
    poll_until(server, lambda seen: bool(server._exchanges))
    joining = Later(new.joined)
    events = poll_until(server, lambda seen: any(event.kind == "joined" for event in seen))
    assert ControlEvent(2, "joined", (1,)) in events
    server.mark_joined(2)
    poll_until(server, joining.is_done)
    assert joining.value == new.joined() == 3
    late = Later(clients[1].exchange, 1)
    poll_until(server, lambda seen: len(server._exchanges[1, 4]) == 2)
    assert not early.is_done()
    mine = Later(new.exchange, 2)
    poll_until(server, lambda seen: all(one.is_done() for one in (early, late, mine)))
    assert early.value == late.value == mine.value == [0, 1, 2]
    assert clients[0].gone == clients[1].gone == new.gone == frozenset()
    assert (clients[0].posted, clients[0].joined()) == ({}, 4)  # it was there from the start


def test_exchanges_do_not_wait_for_workers_that_have_returned(server: ControlServer) -> None:
    """A replacement that joins after the last exchange of the others would wait forever."""
    clients = called(server, 3)
    pair = [Later(client.exchange, "x") for client in clients[1:]]
    poll_until(server, lambda seen: len(server._exchanges.get((1, 1), {})) == 2)
    server.mark_returned(0)
    poll_until(server, lambda seen: all(one.is_done() for one in pair))
    assert [one.value for one in pair] == [[None, "x", "x"]] * 2
    server.mark_returned(1)
    alone = Later(clients[2].exchange, "y")
    poll_until(server, alone.is_done)
    assert alone.value == [None, None, "y"]
    assert clients[2].gone == frozenset()  # they are not gone


def test_posted_values_come_after_earlier_messages(server: ControlServer) -> None:
    (client,) = called(server, 1)
    for number in range(100):
        client.tell(number)
    client.post("all", 100)
    events: list[ControlEvent] = []
    while not server.posted:
        events += server.poll(0.05)
    assert sum(len(event.content[2]) for event in events if event.kind == "report") == 100


@pytest.mark.parametrize(
    ("file", "waits"),
    [
        (f"{manyhands.__path__[0]}/transports/shm/transport.py", True),
        (f"{manyhands.__path__[0]}/transports/wrapper.py", False),
        (f"{manyhands.__path__[0]}/engine/fault_injection/faults.py", False),
        ("/venv/lib/site-packages/torch/distributed/distributed_c10d.py", True),
        ("/venv/lib/site-packages/torch/utils/data/dataloader.py", False),
        ("/home/me/task.py", False),
    ],
)
def test_where_code_waits_for_other_workers(file: str, waits: bool) -> None:
    frames: list[FrameType] = []
    code = compile("def stand(frames, current):\n    frames.append(current())\n", file, "exec")
    space: dict[str, Any] = {}
    exec(code, space)  # noqa: S102 (a function in a file that need not exist)
    space["stand"](frames, sys._getframe)
    assert is_waiting(frames[0]) == waits


def test_the_caller_of_the_standard_library_decides() -> None:
    """`exchange` waits in a queue; a data loader does so too, and does not wait for other workers."""
    gate = threading.Event()
    thread = in_thread(gate.wait)
    while (
        frame := sys._current_frames().get(thread.ident or 0)
    ) is None or "wait" not in frame.f_code.co_name:
        time.sleep(0.01)
    assert not is_waiting(frame)
    gate.set()


def test_values_that_are_too_large_are_refused_where_they_are_sent(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other end would close the connection without saying why."""
    (client,) = called(server, 1)
    monkeypatch.setattr(connection_module, "MAX_VALUE", 1000)
    sentence = r"^a message of 2,0\d\d bytes is too large for the control connection, .* to 1,000: return or"
    for send in (client.tell, lambda value: client.post("name", value), client.exchange):
        with pytest.raises(ManyhandsError, match=sentence):
            send(b"x" * 2000)
    with pytest.raises(ManyhandsError, match=sentence):
        pack(len, (b"x" * 2000,))
    failure = perform(pickle.dumps((bytes, (2000,), {})), None).failure
    assert failure is not None
    assert failure.kind == "ours"
    assert re.match(sentence, failure.text)


def test_a_payload_that_cannot_be_unpickled_is_a_failure() -> None:
    failure = perform(b"not a pickle", None).failure
    assert failure is not None
    assert failure.kind == "other"
    assert "UnpicklingError" in failure.trace
