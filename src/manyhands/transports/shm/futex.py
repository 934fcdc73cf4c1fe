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

from manyhands.transports.waiting import fence

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}  # of the system call
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1
NAP = 1e-3  # seconds of sleep where nobody can ring
LONGEST = 0.05  # seconds of one sleep: a ring that is lost all the same, with whoever died, costs no more


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@final
class FutexEvent:
    """One word of memory that several processes have mapped.

        whoever rings               whoever waits
        change what is waited for   read the word
        fence                       fence
        write the word              look at what is waited for
        wake                        sleep, if the word is still the one that was read

    Without the fences a processor that changes the order of writes or of reads (ARM) may show the new word
    with the old content: whoever waits would take the ring for heard, and sleep on. A test goes through all
    orders (tests/transports/test_ordering.py).
    """

    def __init__(self, mapped: mmap.mmap, offset: int, rank: int, size: int) -> None:
        self._word = ctypes.c_uint32.from_buffer(mapped, offset)
        self._address = ctypes.addressof(self._word)
        self._rank, self._size, self._count = rank, size, 0
        self._call = _system_call()

    def ring(self) -> None:
        """Wake everybody who waits; no two ranks ever write the same number, so no change goes unseen."""
        self._count += 1
        fence()
        self._word.value = (self._count * self._size + self._rank) & 0xFFFFFFFF
        if self._call is not None:
            self._call(self._address, _WAKE, _ALL, None, None, 0)

    def until(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Sleep until it is so, at most so long; whether it is."""
        end = time.perf_counter() + seconds
        while True:
            seen = self._word.value
            fence()
            if ready():
                return True
            left = end - time.perf_counter()
            if left <= 0:
                return False
            if self._call is None:
                time.sleep(min(left, NAP))
                continue
            nap = min(left, LONGEST)
            span = _Time(int(nap), int(nap % 1 * 1e9))
            self._call(self._address, _WAIT, seen, ctypes.byref(span), None, 0)


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
