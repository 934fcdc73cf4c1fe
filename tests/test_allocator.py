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

def held():
    "Resident memory, in blocks."
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / BLOCK

outside = faults(8)
before = held()
with kept_memory():
    faults(16)  # the first few find their places
    inside = faults(8)
    kept = held() - before
print(json.dumps([outside, inside, kept, held() - before]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has it")
def test_a_block_is_not_faulted_in_every_time_and_goes_back_in_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    outside, inside, kept, after = json.loads(done.stdout)
    if outside < 4:
        pytest.skip("this system's pages are so large that they hide the difference")
    assert inside < 0.1 * outside
    assert kept > 0.9
    assert after < 0.1
