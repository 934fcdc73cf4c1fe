"""A bell in shared memory: whoever waits for another process sleeps until it rings, at no cost to others.

Looking again and again is quick where every worker has a core of its own. Where a server shares the cores
with those it serves, each look takes time from them; so it sleeps on a word of memory (Linux: a futex) that
whoever wants something changes. Where there is no such call, it looks again and again.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
import time
from collections.abc import Callable
from typing import final

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}  # of the system call
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1
NAP = 1e-3  # seconds of sleep where nobody can ring


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@final
class Bell:
    """One word of memory that several processes have mapped."""

    def __init__(self, mapped: mmap.mmap, offset: int, rank: int, size: int) -> None:
        self._word = ctypes.c_uint32.from_buffer(mapped, offset)
        self._rank, self._size, self._count = rank, size, 0
        self._call = _system_call()

    def ring(self) -> None:
        """Wake everybody who waits; no two ranks ever write the same number, so no change goes unseen."""
        self._count += 1
        self._word.value = (self._count * self._size + self._rank) & 0xFFFFFFFF
        if self._call is not None:
            self._call(ctypes.addressof(self._word), _WAKE, _ALL, None, None, 0)

    def until(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Sleep until it is so, at most so long; whether it is."""
        end = time.perf_counter() + seconds
        while True:
            seen = self._word.value
            if ready():
                return True
            left = end - time.perf_counter()
            if left <= 0:
                return False
            if self._call is None:
                time.sleep(min(left, NAP))
                continue
            span = _Time(int(left), int(left % 1 * 1e9))
            self._call(ctypes.addressof(self._word), _WAIT, seen, ctypes.byref(span), None, 0)


def _system_call() -> Callable[..., int] | None:
    number = _NUMBERS.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return None
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long

    def futex(address: int, operation: int, value: int, span: object, other: object, last: int) -> int:
        answer: int = call(
            ctypes.c_long(number),
            ctypes.c_void_p(address),
            ctypes.c_int(operation),
            ctypes.c_uint32(value),
            span,
            other,
            ctypes.c_uint32(last),
        )
        return answer

    return futex
