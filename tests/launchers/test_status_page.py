"""The page that outlives whoever writes on it."""

from __future__ import annotations

import os
import signal

import pytest

from manyhands.core.rank_info import STATUS, RankStatus
from manyhands.launchers.supervision.status_page import StatusPage, slot

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no such memory")


def test_what_a_killed_process_wrote_last_is_read() -> None:
    board = StatusPage(3)
    assert board.read(1) is None
    child = os.fork()
    if child == 0:
        mine = slot(board.address, 1)
        assert mine is not None
        for step in range(1000):
            STATUS.pack_into(mine, 0, step, 12_345, b"wait", b"barrier")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert board.read(1) == RankStatus(999, "wait", "barrier 12,345")
    assert board.read(0) is None
    board.close()
    board.close()
    assert board.read(1) is None


def test_a_phase_without_an_operation() -> None:
    board = StatusPage(1)
    mine = slot(board.address, 0)
    assert mine is not None
    STATUS.pack_into(mine, 0, 7, 0, b"backward", b"")
    assert board.read(0) == RankStatus(7, "backward", "")


def test_who_comes_in_anothers_place_finds_nothing_of_it() -> None:
    board = StatusPage(3)
    for rank in range(3):
        mine = slot(board.address, rank)
        assert mine is not None
        STATUS.pack_into(mine, 0, rank, 0, b"forward", b"")
    board.wipe(1)
    assert [board.read(rank) for rank in range(3)] == [
        RankStatus(0, "forward"),
        None,
        RankStatus(2, "forward"),
    ]
    board.close()
    board.wipe(1)


def test_nobody_writes_on_a_strangers_page() -> None:
    """The path of a descriptor means something else on another host."""
    board = StatusPage(1)
    assert board.address is not None
    path, secret = board.address
    assert slot(None, 0) is None
    assert slot((path, b"x" * len(secret)), 0) is None
    assert slot((path, secret), 1) is None, "there is no room for a second worker"
    assert slot(("/proc/1/fd/999999", secret), 0) is None
