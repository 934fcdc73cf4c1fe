"""An event in shared memory: a process sleeps on a word of memory (a futex) until another process changes it.

Polling is fast if every worker has a core of its own. A parameter server shares its cores with the workers
it serves, and polling would take time from them. So it sleeps until it is notified. Systems without futexes
poll.
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

_SYSTEM_CALL_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1
POLL_INTERVAL = 1e-3  # seconds between two checks on systems without futexes
LONGEST_SLEEP = 0.05  # seconds: if a notification is lost with a process that died, it costs no more


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@final
class FutexEvent:
    """One word of memory that several processes have mapped.

        the notifier            the waiter
        change the content      read the word
        fence                   fence
        write the word          check the content
        wake                    sleep, if the word is still the one that was read

    Without the fences, a processor that reorders writes or reads (ARM) may show the new word with the old
    content. The waiter would then sleep although it was notified. A test explores all orders
    (tests/transports/test_ordering.py).
    """

    def __init__(self, mapped: mmap.mmap, offset: int, rank: int, size: int) -> None:
        self._word = ctypes.c_uint32.from_buffer(mapped, offset)
        self._address = ctypes.addressof(self._word)
        self._rank, self._size, self._count = rank, size, 0
        self._call = _system_call()

    def notify(self) -> None:
        """Wake all waiters. No two ranks ever write the same value, so that every write is a change."""
        self._count += 1
        fence()
        self._word.value = (self._count * self._size + self._rank) & 0xFFFFFFFF
        if self._call is not None:
            self._call(self._address, _WAKE, _ALL, None, None, 0)

    def wait_for(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Sleep until `ready()` is true, for at most `seconds`. Return whether it is."""
        end = time.perf_counter() + seconds
        while True:
            word = self._word.value
            fence()
            if ready():
                return True
            left = end - time.perf_counter()
            if left <= 0:
                return False
            if self._call is None:
                time.sleep(min(left, POLL_INTERVAL))
                continue
            sleep = min(left, LONGEST_SLEEP)
            span = _TimeSpec(int(sleep), int(sleep % 1 * 1e9))
            self._call(self._address, _WAIT, word, ctypes.byref(span), None, 0)


def _system_call() -> Callable[..., int] | None:
    number = _SYSTEM_CALL_NUMBERS.get(platform.machine())
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
