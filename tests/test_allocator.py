"""Freed memory stays while a worker trains, and goes back afterwards."""

from __future__ import annotations

import resource
import sys

import pytest
import torch

from manyhands.allocator import kept_memory

PAGES = 64 * 2**20 // resource.getpagesize()


def faults(times: int) -> float:
    """Page faults, in blocks of 64 MB, of writing such a block again and again."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.empty(16 * 2**20).fill_(1.0)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / PAGES


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has it")
def test_a_block_is_faulted_in_once_not_every_time() -> None:
    outside = faults(8)
    with kept_memory():
        inside = faults(8)
    again = faults(8)
    if outside < 4:
        pytest.skip("this system's pages are so large that they hide the difference")
    assert inside < 0.5 * outside
    assert again > 2 * inside
