"""One process at a time: locks on files that the system gives up with their holder, on every system.

Linux and macOS lock the file (flock). Windows locks a byte of it, one that nobody reads or writes, since what
is locked there cannot even be read. Where there is neither, everybody is let in: nobody could tell.
"""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

BYTE = 2**30  # which one, on Windows
AGAIN = 0.1  # seconds between two tries where there is no call that waits


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


_fcntl, _msvcrt = _module("fcntl"), _module("msvcrt")


def take(descriptor: int, *, wait: bool = False) -> bool:
    """Hold an open file until it is closed; False where another process does and this one is not to wait."""
    if _fcntl is not None:
        try:
            _fcntl.flock(descriptor, _fcntl.LOCK_EX | (0 if wait else _fcntl.LOCK_NB))
        except BlockingIOError:
            return False
    elif _msvcrt is not None:
        while not _take_byte(descriptor):
            if not wait:
                return False
            time.sleep(AGAIN)
    return True


def _take_byte(descriptor: int) -> bool:
    here = os.lseek(descriptor, 0, os.SEEK_CUR)
    os.lseek(descriptor, BYTE, os.SEEK_SET)
    try:
        _msvcrt.locking(descriptor, _msvcrt.LK_NBLCK, 1)
    except OSError:
        return False
    finally:
        os.lseek(descriptor, here, os.SEEK_SET)
    return True
