"""The log of a worker: where everything that its process writes goes."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import sys
from pathlib import Path


def log_of(folder: Path | None, rank: int) -> Path | None:
    """The log file of a rank."""
    return None if folder is None else folder / f"rank-{rank}.log"


def has_output(log: Path | None) -> bool:
    """Whether the last process that used this log has written anything after its heading."""
    if log is None:
        return False
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 2**16))
            return file.read().rpartition(b"\n--- ")[2].count(b"\n") > 1
    except OSError:
        return False


def redirect_output(log: Path | None, title: str) -> None:
    """Send the output of this process, native code included, to its log; a crash leaves a traceback there."""
    target = os.open(os.devnull, os.O_WRONLY)
    if log is not None:
        with contextlib.suppress(OSError):  # a host without that folder: its output is lost, the run is not
            log.parent.mkdir(parents=True, exist_ok=True)
            target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(target, number)
    os.close(target)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    print(f"--- {now} {title}, pid {os.getpid()}", flush=True)
    faulthandler.enable(sys.stderr)
