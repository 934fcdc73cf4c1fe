"""Faults by script: what happens to which rank at which step, for drills and tests of law 5.

MANYHANDS_FAULT=SIGKILL@1:20 manyhands train digits-mlp --workers 2        rank 1, step 20, in a collective
MANYHANDS_FAULT=hang@0:5:data manyhands train digits-mlp --workers 2       rank 0, step 5, loading data
MANYHANDS_SLOW=4@1 manyhands train mnist-cnn --workers 2                   rank 1 computes four times slower
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from typing import Literal, NamedTuple, Self, cast

from manyhands.core.errors import UsageError, shown

VARIABLE = "MANYHANDS_FAULT"
SLOW = "MANYHANDS_SLOW"
Where = Literal["data", "backward", "collective"]
WHERE: tuple[Where, ...] = ("data", "backward", "collective")
KINDS = ("raise", "exit", "oom", "hang", "SIGKILL", "SIGSEGV", "SIGILL", "SIGSTOP", "SIGTERM")


class ScriptedError(RuntimeError):
    """Raised on purpose."""


class Fault(NamedTuple):
    """One line of the script."""

    kind: str
    rank: int
    step: int  # steps made before it
    where: Where = "collective"

    @classmethod
    def parse(cls, text: str) -> Self:
        """`KIND@RANK:STEP[:WHERE]`."""
        kind, _, place = text.partition("@")
        match = re.fullmatch(r"(\d+):(\d+)(?::(\w+))?", place)
        if kind not in KINDS or match is None or (match[3] or "data") not in WHERE:
            raise UsageError(
                f"{VARIABLE}={shown(text)} is not KIND@RANK:STEP or KIND@RANK:STEP:WHERE "
                f"(kinds: {', '.join(KINDS)}; where: {', '.join(WHERE)})"
            )
        return cls(kind, int(match[1]), int(match[2]), cast(Where, match[3] or "collective"))

    def due(self, rank: int, step: int, where: Where) -> bool:
        """Whether it is to happen here and now."""
        return (rank, step, where) == (self.rank, self.step, self.where)

    def strike(self) -> None:
        """Let it happen, and leave the time of it in the worker's log."""
        print(f"fault: {self.kind} at {time.time():.3f}", file=sys.stderr, flush=True)
        if self.kind == "raise":
            raise ScriptedError(f"raised by script at rank {self.rank}, step {self.step}")
        if self.kind == "exit":
            os._exit(3)
        if self.kind == "hang":
            while True:
                time.sleep(3600)
        if self.kind == "oom":
            _run_out_of_memory()
        os.kill(os.getpid(), signal.Signals[self.kind])
        time.sleep(0.05)  # SIGSTOP and SIGTERM are not deadly at once


class Slow(NamedTuple):
    """A rank that computes so many times slower than it could."""

    factor: float
    rank: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """`FACTOR@RANK`."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)@(\d+)", text)
        if match is None or float(match[1]) < 1:
            raise UsageError(
                f"{SLOW}={shown(text)} is not FACTOR@RANK with a factor of at least 1, such as 4@1"
            )
        return cls(float(match[1]), int(match[2]))


def slowness(rank: int) -> float:
    """How many times slower this rank was asked to compute: 1 where nobody asked."""
    text = os.environ.get(SLOW)
    slow = Slow.parse(text) if text else None
    return slow.factor if slow is not None and slow.rank == rank else 1.0


def from_environment() -> Fault | None:
    """The fault someone asked for, if anyone did."""
    text = os.environ.get(VARIABLE)
    return Fault.parse(text) if text else None


def _run_out_of_memory() -> None:
    """Lower this process's limit and allocate past it: what malloc answers is a real refusal."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (2**28, resource.getrlimit(resource.RLIMIT_AS)[1]))
    hoard = bytearray(2**30)
    del hoard
