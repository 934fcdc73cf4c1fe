"""Scripted faults: what happens to which rank at which step, to test law 5.

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
    """An error that a script has asked for."""


class Fault(NamedTuple):
    """One scripted fault."""

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
        """Whether it is to happen at this rank, step and point."""
        return (rank, step, where) == (self.rank, self.step, self.where)

    def strike(self) -> None:
        """Cause the fault, and write the time of it to the worker's log."""
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
        time.sleep(0.05)  # SIGSTOP and SIGTERM do not end the process at once


class Slow(NamedTuple):
    """A rank that computes slower than it could, by a factor."""

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
    """By which factor this rank computes slower: 1 without MANYHANDS_SLOW."""
    text = os.environ.get(SLOW)
    slow = Slow.parse(text) if text else None
    return slow.factor if slow is not None and slow.rank == rank else 1.0


def from_environment() -> Fault | None:
    """The fault of MANYHANDS_FAULT, or None."""
    text = os.environ.get(VARIABLE)
    return Fault.parse(text) if text else None


def _run_out_of_memory() -> None:
    """Lower the memory limit of this process and allocate beyond it, so that malloc really fails."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (2**28, resource.getrlimit(resource.RLIMIT_AS)[1]))
    hoard = bytearray(2**30)
    del hoard
