"""What only shared memory has: files that must not stay, memory that must be free, rings that fill up."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manyhands.core.errors import ManyhandsError, PeerLostError
from manyhands.core.rank_info import RankInfo
from manyhands.transports.base import Transport
from manyhands.transports.shm import leftovers, segment
from manyhands.transports.shm.transport import ShmTransport
from transports.groups import DIED, between_hosts, context, processes

run_group = partial(processes, partial(ShmTransport, timeout=20.0))
PAIR = ["here", "here"]


def names_of(pid: int) -> list[str]:
    return [path.name for path in leftovers.home().glob(f"{leftovers.PREFIX}-{pid}-*")]


def shares_and_ends(transport: Transport, how: str) -> int:
    segment = transport.share("weights", 2**20)
    segment.fill_(1)
    transport.barrier()
    if how == "exit":
        os._exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


@pytest.mark.parametrize("how", ["peace", "exit", "kill"])
def test_nothing_is_left_behind(how: str) -> None:
    before = set(leftovers.home().glob(f"{leftovers.PREFIX}-*"))
    results = run_group(PAIR, partial(shares_and_ends, how=how))
    if how == "peace":
        assert not any(names_of(pid) for pid in results)
    else:
        assert results == [DIED, DIED]
        assert set(leftovers.home().glob(f"{leftovers.PREFIX}-*")) <= before


def stays_between_create_and_unlink(pipe: Connection) -> None:
    def exchange(text: str) -> list[str]:
        pipe.send(text)
        time.sleep(60)
        return []

    segment.create_together(exchange, True, "control", 4096)


def test_files_of_a_group_killed_at_the_wrong_moment_are_removed() -> None:
    """Between creating a name and removing it: only then can a file be left behind."""
    ours, theirs = context.Pipe()
    creator = context.Process(target=stays_between_create_and_unlink, args=(theirs,))
    creator.start()
    name = Path(ours.recv()).name
    assert re.fullmatch(rf"manyhands-{creator.pid}-\d+-[0-9a-f]{{8}}-control", name)
    assert name not in leftovers.sweep()  # its creator is alive
    assert names_of(creator.pid or 0) == [name]
    creator.kill()
    creator.join()
    assert name in leftovers.sweep()
    assert names_of(creator.pid or 0) == []


def test_a_reused_pid_does_not_protect_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(leftovers, "home", lambda: tmp_path)
    mine = leftovers.new_name("control")
    pid, start = mine.split("-")[1:3]
    reused = f"manyhands-{pid}-{int(start) - 1}-0badcafe-control"
    strange = "manyhands-of-someone-else"
    for name in (mine, reused, strange):
        (tmp_path / name).touch()
    assert leftovers.sweep() == [reused]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([mine, strange])


def asks_for_too_much(transport: Transport) -> tuple[str, list[float]]:
    with pytest.raises(ManyhandsError) as caught:
        transport.share("weights", 2**45)
    return str(caught.value), transport.all_reduce(torch.ones(1)).tolist()


def test_too_little_memory_is_an_error_that_says_how_much_is_free() -> None:
    """Otherwise a later write would be a SIGBUS. The transport works as before."""
    for text, total in run_group(PAIR, asks_for_too_much):
        assert re.fullmatch(
            r"shared memory: 35,184,372\.1 MB needed, [\d,.]+ MB free in \S+ "
            r"\(in a container: docker run --shm-size=8g\)",
            text,
        )
        assert total == [2.0]
    assert not names_of(os.getpid())


def cannot_see(path: Path) -> int:
    raise ManyhandsError(f"shared memory {path.parent} cannot be opened")


def builds_where_one_cannot_see(info: RankInfo) -> Any:
    if info.rank == 1:
        segment._open = cannot_see
    with pytest.raises(ManyhandsError) as caught:
        ShmTransport(info)
    return SimpleNamespace(error=str(caught.value), close=lambda: None)


def error_of(transport: Any) -> str:
    return transport.error


def test_if_one_cannot_open_the_file_all_fail_with_its_reason() -> None:
    texts = processes(builds_where_one_cannot_see, PAIR, error_of)
    assert texts == [f"shared memory {leftovers.home()} cannot be opened"] * 2


def sends_and_leaves(transport: Transport) -> list[float] | None:
    if transport.rank == 1:
        transport.send(torch.full((3,), 7.0), 0)
        return None
    time.sleep(0.3)
    received = transport.recv(torch.zeros(3), 1).tolist()
    with pytest.raises(PeerLostError, match=r"^worker 1 is gone \(noticed in recv 2\)$"):
        transport.recv(torch.zeros(3), 1)
    return received


def test_a_message_outlives_its_sender() -> None:
    assert run_group(PAIR, sends_and_leaves)[0] == [7.0, 7.0, 7.0]


def expects_another_size(transport: Transport) -> str:
    if transport.rank == 1:
        transport.send(torch.zeros(3), 0)
        return ""
    with pytest.raises(ManyhandsError) as caught:
        transport.recv(torch.zeros(2), 1)
    return str(caught.value)


def test_a_message_of_another_size_is_refused() -> None:
    assert run_group(PAIR, expects_another_size)[0] == "recv 1: received 12 bytes, expected 8"


def calls_many_barriers(transport: Transport) -> float:
    since = time.monotonic()
    for _ in range(500):
        transport.barrier()
    return time.monotonic() - since


def test_more_workers_than_cores_are_not_pathological() -> None:
    """Waiting workers give up their cores: 500 barriers of five workers take a moment, not minutes."""
    assert max(run_group(["here"] * 5, calls_many_barriers)) < 10


def waits_for_a_rank_of_the_group(transport: Transport) -> str:
    if transport.rank == 3:
        return ""
    if transport.rank != 2:
        time.sleep(1.0)
        return ""
    with pytest.raises(PeerLostError) as caught:
        transport.on_host.barrier()
    return str(caught.value)


def test_errors_name_the_rank_in_the_whole_group() -> None:
    """On host b it is worker 1, in the whole group worker 3."""
    texts = processes(partial(between_hosts, name="torch"), "aabb", waits_for_a_rank_of_the_group)
    assert texts[2] == "worker 3 is gone (noticed in barrier 1)"


def test_sweeping_needs_no_torch() -> None:
    code = (
        "import sys; import manyhands.transports.shm.leftovers, manyhands.transports.connect;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
