"""Keep freed memory in the process while it trains: handing it back costs a page fault for every page.

glibc gives each large block back to the system when it is freed, and gets it again, zeroed page by page, a
step later. For the activations of a convolutional network at batch 512 that takes as long as the arithmetic
(docs/lab.md has the figures).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# options of glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_KEEP = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1}
# Setting any ends glibc's own adjustment for good, so afterwards they are left where it would have led.
_AFTER = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 * 2**20, _TRIM_THRESHOLD: 64 * 2**20}
# Blocks that fill a huge page are mapped by themselves, so that each is the system's again the moment it is
# freed; of smaller ones some are kept.
_RETURN = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 2**21, _TRIM_THRESHOLD: 2**25}


@contextmanager
def kept_memory() -> Iterator[None]:
    """While entered, freed memory is kept for the next step; then it goes back. Without glibc: nothing."""
    libc = _glibc()
    if libc is None:
        yield
        return
    _set(libc, _KEEP)
    try:
        yield
    finally:
        _set(libc, _AFTER)
        libc.malloc_trim(0)


@contextmanager
def returned_memory() -> Iterator[None]:
    """While entered, freed memory goes back at once, also where it would be kept: for whoever has little."""
    libc = _glibc()
    if libc is None:
        yield
        return
    _set(libc, _RETURN)
    libc.malloc_trim(0)
    try:
        yield
    finally:
        _set(libc, _AFTER)


def huge_pages() -> None:
    """Large tensors of processes that load torch from now on lie on huge pages, where the kernel has them.

    Whoever hands memory back every step pays for each page when it comes again: five hundred times fewer of
    them took a quarter off a step of VGG-19 that does so. A choice of torch's, made when it is loaded.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None


def _set(libc: ctypes.CDLL, options: dict[int, int]) -> None:
    for name, value in options.items():
        libc.mallopt(name, value)
