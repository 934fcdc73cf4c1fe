"""The status page outlives the workers that write on it."""

from __future__ import annotations

import os
import signal

import pytest

from manyhands.core.rank_info import STATUS, RankStatus
from manyhands.launchers.control.status_page import StatusPage, slot

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd_create")


def test_what_a_killed_process_wrote_last_is_read() -> None:
    page = StatusPage(3)
    assert page.read(1) is None
    child = os.fork()
    if child == 0:
        mine = slot(page.address, 1)
        assert mine is not None
        for step in range(1000):
            STATUS.pack_into(mine, 0, step, 12_345, b"wait", b"barrier")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert page.read(1) == RankStatus(999, "wait", "barrier 12,345")
    assert page.read(0) is None
    page.close()
    page.close()
    assert page.read(1) is None


def test_a_phase_without_an_operation() -> None:
    page = StatusPage(1)
    mine = slot(page.address, 0)
    assert mine is not None
    STATUS.pack_into(mine, 0, 7, 0, b"backward", b"")
    assert page.read(0) == RankStatus(7, "backward", "")


def test_a_replacement_starts_with_an_empty_status() -> None:
    page = StatusPage(3)
    for rank in range(3):
        mine = slot(page.address, rank)
        assert mine is not None
        STATUS.pack_into(mine, 0, rank, 0, b"forward", b"")
    page.clear(1)
    assert [page.read(rank) for rank in range(3)] == [
        RankStatus(0, "forward"),
        None,
        RankStatus(2, "forward"),
    ]
    page.close()
    page.clear(1)


def test_a_page_of_another_process_is_not_written() -> None:
    """The path of a descriptor means something else on another host."""
    page = StatusPage(1)
    assert page.address is not None
    path, secret = page.address
    assert slot(None, 0) is None
    assert slot((path, b"x" * len(secret)), 0) is None
    assert slot((path, secret), 1) is None, "there is no room for a second worker"
    assert slot(("/proc/1/fd/999999", secret), 0) is None
