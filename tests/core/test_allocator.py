"""Freed memory is kept while a worker trains, and returned afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.core import allocator

# In a child: the heap of a process that has run other tests has holes, which would be filled first.
CHILD = """
import json, resource, torch
from manyhands.core.allocator import kept_memory

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


@pytest.mark.parametrize(
    ("loaded", "given", "then"),
    [("", None, "1"), ("", "0", "0"), ("torch", None, None)],
    ids=["before torch", "as the user says", "too late"],
)
def test_huge_pages_are_chosen_before_torch_is_loaded(
    loaded: str, given: str | None, then: str | None
) -> None:
    """In a child, where torch is not yet loaded; an empty module is as good as the real one."""
    code = (
        f"import os, sys, types; sys.modules.update({{name: types.ModuleType(name) for name in "
        f"{loaded.split()}}}); from manyhands.core import allocator; allocator.huge_pages(); "
        "print(repr(os.environ.get('THP_MEM_ALLOC_ENABLE')))"
    )
    environ = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    environ |= {} if given is None else {"THP_MEM_ALLOC_ENABLE": given}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == repr(then)


@pytest.mark.parametrize(("offload", "asked"), [("none", 0), ("all", 1)])
def test_a_run_that_hands_memory_back_asks_for_huge_pages(
    offload: str, asked: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(allocator, "huge_pages", lambda: calls.append(None))
    mh.train("quadratic", epochs=1, offload=offload, threads=1, quiet=True, out=here / "run")
    mh.train(str(here / "run"), resume=True, quiet=True)
    assert len(calls) == 2 * asked
