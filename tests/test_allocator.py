"""Freed memory stays while a worker trains, and goes back afterwards."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# In a child: the heap of a process that has run other tests has holes, which would be filled first.
CHILD = """
import json, resource, torch
from manyhands.allocator import kept_memory

BLOCK = 64 * 2**20

def faults(times):
    "Page faults, in blocks of 64 MB, of writing such a block again and again."
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.empty(BLOCK // 4).fill_(1.0)
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return pages * resource.getpagesize() / BLOCK

outside = faults(8)
with kept_memory():
    faults(16)  # the first few find their places
    inside = faults(8)
print(json.dumps([outside, inside, faults(8)]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has it")
def test_a_block_is_not_faulted_in_every_time() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    outside, inside, again = json.loads(done.stdout)
    if outside < 4:
        pytest.skip("this system's pages are so large that they hide the difference")
    assert inside < 0.1 * outside
    assert again > 0.5 * outside
