"""The hub and the line: strangers are turned away, nothing blocks, what is told arrives."""

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
from manyhands.launchers.control import connection as wire_module
from manyhands.launchers.control import server as hub_module
from manyhands.launchers.control.client import Call, ControlClient, is_waiting
from manyhands.launchers.control.connection import Connection, HandshakeError, connect
from manyhands.launchers.control.remote_calls import CallResult, pack, perform
from manyhands.launchers.control.server import ControlEvent, ControlServer

KEY = b"k" * 32


@pytest.fixture
def hub() -> Iterator[ControlServer]:
    with ControlServer() as made:
        yield made


def poll_until(
    hub: ControlServer, done: Callable[[list[ControlEvent]], bool], seconds: float = 10
) -> list[ControlEvent]:
    """All that comes until it is enough; every single look is short, whoever is connected."""
    events: list[ControlEvent] = []
    until = time.monotonic() + seconds
    while not done(events):
        assert time.monotonic() < until, events
        begun = time.monotonic()
        events += hub.poll(0.05)
        assert time.monotonic() - begun < 5
    return events


def any_at_all(events: list[ControlEvent]) -> bool:
    return bool(events)


def in_thread(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("address", [None, "127.0.0.1:0"], ids=["abstract", "tcp"])
def test_strangers_are_turned_away_and_hold_nobody_up(
    hub: ControlServer, address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "HANDSHAKE", 0.3)
    found = hub.listen(KEY, address)
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

    def as_one_of_ours() -> None:
        wire = connect(found, KEY)
        wire.send("hello", 3, "h", 42)
        wire.flush()
        ours.append(wire)

    in_thread(as_one_of_ours)
    events = poll_until(hub, any_at_all)
    assert events == [ControlEvent(3, "hello", ("h", 42))]
    assert hub.ranks == {3}
    poll_until(hub, lambda seen: not wrong.is_alive())
    assert len(refused) == 1
    for sock in (silent, half, huge, noise):  # after a while it has closed on all of them
        sock.settimeout(5)
        poll_until(hub, lambda seen, sock=sock: _closed(sock))  # type: ignore[misc]
        sock.close()
    ours[0].close()
    assert poll_until(hub, any_at_all) == [ControlEvent(3, "lost")]


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


def test_a_hub_without_descriptors_does_not_spin(hub: ControlServer) -> None:
    """D15: whoever waits at the door keeps the listener readable, and `poll` returned at once, for ever."""
    address = hub.listen(KEY)
    waiting = [socket.socket(socket.AF_UNIX) for _ in range(4)]
    for sock in waiting:
        sock.connect("\0" + address[1:])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as highest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest.fileno(), hard))
    try:
        looks, until = 0, time.monotonic() + 0.4
        while time.monotonic() < until:
            hub.poll(0.1)
            looks += 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert looks < 20
    connecting = Later(connect, address, KEY)
    poll_until(hub, connecting.is_done)  # it looks again
    hub.close_door()
    for sock in waiting:
        sock.close()


def test_a_crowd_of_strangers_keeps_nobody_out(hub: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """D15: there is a limit, and the oldest has had the most time."""
    monkeypatch.setattr(hub_module, "STRANGERS", 3, raising=False)
    address = hub.listen(KEY)
    crowd = []
    for _ in range(6):
        crowd.append(socket.socket(socket.AF_UNIX))
        crowd[-1].connect("\0" + address[1:])
        hub.poll(0.1)
    poll_until(hub, lambda seen: _closed(crowd[2]), 3)
    assert [_closed(sock) for sock in crowd] == [True] * 3 + [False] * 3
    connecting = Later(connect, address, KEY)
    poll_until(hub, connecting.is_done)
    for sock in crowd:
        sock.close()


def test_a_server_that_is_not_ours_is_recognized() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        in_thread(greet)
        port = server.getsockname()[1]
        with pytest.raises(HandshakeError, match=rf"^what answers at 127.0.0.1:{port} is not the leader"):
            connect(f"127.0.0.1:{port}", KEY)


def test_nobody_comes_once_the_door_is_closed(hub: ControlServer) -> None:
    address = hub.listen(KEY)
    hub.close_door()
    with pytest.raises(OSError, match="refused"):
        connect(address, KEY)


def test_a_worker_stopped_in_the_middle_of_a_message_blocks_nobody(hub: ControlServer) -> None:
    ours, theirs = socket.socketpair()
    hub.adopt(ours)
    wire = Connection(theirs)
    wire.send("hello", 0, "h", 1)
    wire.send("answer", 1, b"x" * 50_000_000)
    wire.flush()  # what the socket takes: a small part
    assert wire.pending
    events = poll_until(hub, any_at_all)
    assert [event.kind for event in events] == ["hello"]
    hub.send(0, "call", 1, None, b"y" * 50_000_000)  # it does not read, either
    for _ in range(3):
        assert hub.poll(0.01) == []
    wire.close()


def link_to(hub: ControlServer, rank: int = 0, **more: Any) -> ControlClient:
    ours, theirs = socket.socketpair()
    hub.adopt(ours)
    return ControlClient(Connection(theirs), rank, "here", **more)


def test_what_is_told_comes_before_the_answer(hub: ControlServer) -> None:
    link = link_to(hub)
    poll_until(hub, any_at_all)
    hub.send(0, "call", 7, None, b"payload")
    poll_until(hub, lambda seen: not link.orders.empty(), 5)
    assert link.next_call() == Call(7, None, b"payload")
    link.watch(lambda: RankStatus(3, "forward", "", 9))
    for number in range(1000):
        link.tell(number)
    link.answer(CallResult(b"done"))
    events = poll_until(hub, lambda seen: any(event.kind == "answer" for event in seen))
    assert events[-1] == ControlEvent(0, "answer", (7, CallResult(b"done")))
    told = [message for event in events if event.kind == "news" for message in event.content[2]]
    assert len(told) == 1000
    statuses = {event.content[1] for event in events if event.kind == "news"}
    assert RankStatus(3, "forward", "", 9) in statuses
    link.close()


def test_orders_arrive(hub: ControlServer) -> None:
    endings: list[tuple[int, bool]] = []
    link = link_to(hub, ending=lambda code, lost: endings.append((code, lost)))
    poll_until(hub, any_at_all)
    hub.send_all("stop", 15)
    poll_until(hub, lambda seen: link.stop == 15)
    hub.send_all("where")
    (event,) = [
        e for e in poll_until(hub, lambda seen: any(e.kind == "where" for e in seen)) if e.kind == "where"
    ]
    assert "test_orders_arrive" in event.content[0].stack
    assert not event.content[0].waiting
    hub.send_all("abort", 4)
    poll_until(hub, lambda seen: endings == [(4, False)])
    hub.close()
    until = time.monotonic() + 5
    while len(endings) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert endings[1:] == [(1, True)]  # the hub is gone


def test_a_forked_child_does_not_hold_the_line(hub: ControlServer) -> None:
    """A data loader's processes outlive a killed worker for seconds: the hub must see the end at once."""
    ours, theirs = socket.socketpair()
    hub.adopt(ours)
    worker = os.fork()
    if worker == 0:  # a worker, which forks a child that stays
        try:
            ours.close()
            wire = Connection(theirs)
            wire.send("hello", 0, "h", os.getpid())
            wire.flush()
            if os.fork() == 0:
                time.sleep(3)
        finally:
            os._exit(0)
    theirs.close()
    begun = time.monotonic()
    poll_until(hub, lambda seen: any(event.kind == "lost" for event in seen))
    assert time.monotonic() - begun < 2
    os.waitpid(worker, 0)


def called(hub: ControlServer, size: int) -> list[ControlClient]:
    """So many workers, all of them at work."""
    hub.begin(size)
    links = [link_to(hub, rank, ending=ignore) for rank in range(size)]
    poll_until(hub, lambda seen: len(hub.ranks) == size)
    hub.send_all("call", 1, ("here",) * size, b"")
    poll_until(hub, lambda seen: not any(link.orders.empty() for link in links))
    assert [link.next_call() for link in links] == [Call(1, ("here",) * size, b"")] * size
    return links


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


def test_an_exchange_goes_on_without_one_that_is_gone(hub: ControlServer) -> None:
    """Whether it had come or not: nobody gets anything of it, and everybody knows by then that it is gone."""
    links = called(hub, 4)
    waiting = [Later(links[rank].exchange, rank) for rank in (0, 2, 3)]
    poll_until(hub, lambda seen: len(hub._exchanges.get((1, 1), {})) == 3)
    hub.excuse(3)
    assert not waiting[0].is_done()
    hub.excuse(1)
    poll_until(hub, lambda seen: all(one.is_done() for one in waiting))
    assert [one.value for one in waiting] == [[0, None, 2, None]] * 3
    assert links[0].gone == links[2].gone == {1, 3}
    again = [Later(links[rank].exchange, 10 * rank) for rank in (0, 2)]
    poll_until(hub, lambda seen: all(one.is_done() for one in again))
    assert [one.value for one in again] == [[0, None, 20, None]] * 2
    hub.begin(4)
    assert hub.gone == frozenset()


def test_one_that_joins_comes_to_the_exchange_that_is_going_on(hub: ControlServer) -> None:
    links = called(hub, 3)
    links[2].post("address", ("here", 1))
    links[2].post("life", 1)
    poll_until(hub, lambda seen: len(hub.posted) == 2)
    links[1].post("life", 2)  # the latest counts
    poll_until(hub, lambda seen: hub.posted["life"] == pickle.dumps(2, pickle.HIGHEST_PROTOCOL))
    hub.cut(2)
    hub.excuse(2)
    hub.excuse(2)
    for _ in range(3):
        pair = [Later(link.exchange, "x") for link in links[:2]]
        poll_until(hub, lambda seen, pair=pair: all(one.is_done() for one in pair))  # type: ignore[misc]
    new = link_to(hub, 2, ending=ignore)
    poll_until(hub, lambda seen: hub.ranks == {0, 1, 2})
    hub.send(2, "call", 1, ("here",) * 3, b"", None, hub.gone | {0}, hub.posted)
    poll_until(hub, lambda seen: not new.orders.empty())
    call = new.next_call()
    assert isinstance(call, Call)
    assert call.joining
    assert new.posted == {"address": ("here", 1), "life": 2}
    assert new.gone == {0}  # never itself
    with pytest.raises(AssertionError, match="says `joined` before its first exchange"):
        new.exchange(None)
    early = Later(links[0].exchange, 0)
    poll_until(hub, lambda seen: bool(hub._exchanges))
    joining = Later(new.joined)
    events = poll_until(hub, lambda seen: any(event.kind == "joined" for event in seen))
    assert ControlEvent(2, "joined", (1,)) in events
    hub.admit(2)
    poll_until(hub, joining.is_done)
    assert joining.value == new.joined() == 3
    late = Later(links[1].exchange, 1)
    poll_until(hub, lambda seen: len(hub._exchanges[1, 4]) == 2)
    assert not early.is_done()
    mine = Later(new.exchange, 2)
    poll_until(hub, lambda seen: all(one.is_done() for one in (early, late, mine)))
    assert early.value == late.value == mine.value == [0, 1, 2]
    assert links[0].gone == links[1].gone == new.gone == frozenset()
    assert (links[0].posted, links[0].joined()) == ({}, 4)  # it was there from the start


def test_nobody_waits_for_those_who_have_returned(hub: ControlServer) -> None:
    """One that joined when the others had exchanged for the last time would stand there for ever."""
    links = called(hub, 3)
    pair = [Later(link.exchange, "x") for link in links[1:]]
    poll_until(hub, lambda seen: len(hub._exchanges.get((1, 1), {})) == 2)
    hub.retire(0)
    poll_until(hub, lambda seen: all(one.is_done() for one in pair))
    assert [one.value for one in pair] == [[None, "x", "x"]] * 2
    hub.retire(1)
    alone = Later(links[2].exchange, "y")
    poll_until(hub, alone.is_done)
    assert alone.value == [None, None, "y"]
    assert links[2].gone == frozenset()  # they are not


def test_what_is_posted_comes_after_what_was_told(hub: ControlServer) -> None:
    (link,) = called(hub, 1)
    for number in range(100):
        link.tell(number)
    link.post("all", 100)
    told: list[ControlEvent] = []
    while not hub.posted:
        told += hub.poll(0.05)
    assert sum(len(event.content[2]) for event in told if event.kind == "news") == 100


@pytest.mark.parametrize(
    ("file", "waits"),
    [
        (f"{manyhands.__path__[0]}/transports/shm.py", True),
        (f"{manyhands.__path__[0]}/transports/wrap.py", False),
        (f"{manyhands.__path__[0]}/faults.py", False),
        ("/venv/lib/site-packages/torch/distributed/distributed_c10d.py", True),
        ("/venv/lib/site-packages/torch/utils/data/dataloader.py", False),
        ("/home/me/task.py", False),
    ],
)
def test_who_waits_for_others(file: str, waits: bool) -> None:
    frames: list[FrameType] = []
    code = compile("def stand(frames, current):\n    frames.append(current())\n", file, "exec")
    space: dict[str, Any] = {}
    exec(code, space)  # noqa: S102 (a function in a file that need not exist)
    space["stand"](frames, sys._getframe)
    assert is_waiting(frames[0]) == waits


def test_waiting_in_the_standard_library_is_its_callers_waiting() -> None:
    """`exchange` waits in a queue; a data loader does so too, and is not waiting for other workers."""
    gate = threading.Event()
    thread = in_thread(gate.wait)
    while (
        frame := sys._current_frames().get(thread.ident or 0)
    ) is None or "wait" not in frame.f_code.co_name:
        time.sleep(0.01)
    assert not is_waiting(frame)
    gate.set()


def test_what_is_too_large_for_the_line_is_refused_where_it_is_said(
    hub: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other end would hang up on it, and nobody would know why."""
    (link,) = called(hub, 1)
    monkeypatch.setattr(wire_module, "LARGEST", 1000, raising=False)
    sentence = r"^a message of 2,0\d\d bytes is too large for the line .*, which takes up to 1,000: return or"
    for say in (link.tell, lambda value: link.post("name", value), link.exchange):
        with pytest.raises(ManyhandsError, match=sentence):
            say(b"x" * 2000)
    with pytest.raises(ManyhandsError, match=sentence):
        pack(len, (b"x" * 2000,))
    failure = perform(pickle.dumps((bytes, (2000,), {})), None).failure
    assert failure is not None
    assert failure.kind == "ours"
    assert re.match(sentence, failure.text)


def test_an_error_that_cannot_be_pickled_is_told_all_the_same() -> None:
    failure = perform(b"not a pickle", None).failure
    assert failure is not None
    assert failure.kind == "other"
    assert "UnpicklingError" in failure.trace
