"""Locks on files, on every system. The system releases a lock when its holder ends.

Linux and macOS lock the file (flock). Windows locks one byte far behind its end, because locked bytes cannot
be read there. Systems with neither get no locks.
"""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

BYTE = 2**30  # the byte that is locked on Windows
RETRY_EVERY = 0.1  # seconds, on Windows


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


_fcntl, _msvcrt = _module("fcntl"), _module("msvcrt")


def take(descriptor: int, *, wait: bool = False) -> bool:
    """Lock an open file until it is closed. False if another process holds it and `wait` is false."""
    if _fcntl is not None:
        try:
            _fcntl.flock(descriptor, _fcntl.LOCK_EX | (0 if wait else _fcntl.LOCK_NB))
        except BlockingIOError:
            return False
    elif _msvcrt is not None:
        while not _take_byte(descriptor):
            if not wait:
                return False
            time.sleep(RETRY_EVERY)
    return True


def _take_byte(descriptor: int) -> bool:
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    os.lseek(descriptor, BYTE, os.SEEK_SET)
    try:
        _msvcrt.locking(descriptor, _msvcrt.LK_NBLCK, 1)
    except OSError:
        return False
    finally:
        os.lseek(descriptor, position, os.SEEK_SET)
    return True
