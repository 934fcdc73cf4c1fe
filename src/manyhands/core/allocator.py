"""Keep freed memory in the process while it trains: returning it costs a page fault per page.

glibc returns each large block to the system when it is freed. One step later it gets the block again, zeroed
page by page. For the activations of a convolutional network at batch 512 that takes as long as the arithmetic
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
# Setting any of these ends glibc's own adjustment, so afterwards they get the values it would have found.
_AFTER = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 * 2**20, _TRIM_THRESHOLD: 64 * 2**20}
# Blocks of at least a huge page are mapped one by one, so that each is returned as soon as it is freed. Of
# smaller blocks some are kept.
_RETURN = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 2**21, _TRIM_THRESHOLD: 2**25}


@contextmanager
def kept_memory() -> Iterator[None]:
    """While entered, freed memory is kept for the next step. On exit it is returned. Needs glibc."""
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
    """While entered, freed memory is returned at once, also inside `kept_memory`. Needs glibc."""
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
    """Let processes that load torch from now on use huge pages for large tensors, if the kernel has them.

    A process that returns memory at every step pays for each page when it gets it again. With 500 times fewer
    pages such a step of VGG-19 took a quarter less time. torch reads this setting when it is loaded.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None


def _set(libc: ctypes.CDLL, options: dict[int, int]) -> None:
    for name, value in options.items():
        libc.mallopt(name, value)
