"""How long a gang may stand still before that is a hang: learned from how long it stands still in health.

A step of this model on that machine takes what it takes: no fixed number of seconds is right for all. So the
deadline is a multiple of the longest time that a worker stood still and then went on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import final

from manyhands.core.rank_info import RankStatus
from manyhands.launchers.supervision.diagnosis import WAITING

BEFORE_THE_FIRST_STEP = 300.0  # data are fetched, kernels compiled, memory touched
SLACK = 20.0  # times the longest pause seen
AT_LEAST, AT_MOST = 10.0, 600.0
# In these a worker talks to a disk, which may stall for longer than any step.
OUTSIDE_STEPS = ("checkpoint", "other")
AT_LEAST_OUTSIDE_STEPS = 60.0


@dataclass
class _Watched:
    status: RankStatus
    first_step: int
    moved: float  # when
    heard: float


@final
class Watchdog:
    """Told every status with the time of its arrival, it says who has stood still for too long."""

    def __init__(self, timeout: float | None = None) -> None:
        self._timeout = timeout
        self._watched: dict[int, _Watched] = {}
        self._first_step: float | None = None  # when the gang made it
        self._longest = 0.0

    def observe(self, rank: int, status: RankStatus, now: float) -> None:
        """A worker said what it is doing."""
        one = self._watched.get(rank)
        if one is None:
            self._watched[rank] = _Watched(status, status.step, now, now)
            return
        if (status.moves, status.step) != (one.status.moves, one.status.step):
            # how long the start takes says nothing about the steps; one that joins starts later than others
            stepping = self._first_step is not None and one.moved >= self._first_step
            if stepping and one.status.phase != "starting":
                self._longest = max(self._longest, now - one.moved)
            one.moved = now
            if self._first_step is None and status.step > one.first_step:
                self._first_step = now
        one.status, one.heard = status, now

    def correct(self, rank: int, status: RankStatus | None) -> None:
        """What a worker that has fallen silent was doing last, where that is known better."""
        if status is not None and rank in self._watched:
            one = self._watched[rank]
            one.status = status._replace(moves=one.status.moves)

    def release(self, rank: int) -> None:
        """This worker is done, one way or another."""
        self._watched.pop(rank, None)

    def excuse(self, seconds: float) -> None:
        """The observer itself was asleep for so long: nobody stood still."""
        for one in self._watched.values():
            one.moved += seconds
            one.heard += seconds

    def forgive(self, now: float) -> None:
        """Who stood still may have waited for one that is gone: it counts from now, and teaches nothing."""
        for one in self._watched.values():
            one.moved = now

    def still(self, rank: int, now: float) -> float:
        """Seconds since this worker moved."""
        one = self._watched.get(rank)
        return now - one.moved if one else 0.0

    def silent(self, rank: int, now: float) -> float:
        """Seconds since it said anything."""
        one = self._watched.get(rank)
        return now - one.heard if one else 0.0

    def deadline(self, phases: Iterable[str] = ()) -> float:
        """Seconds that workers in these phases may stand still."""
        phases = set(phases)
        starting = "starting" in phases
        if self._timeout is not None:  # which is about steps: nobody knows how long fetching data takes
            return max(self._timeout, BEFORE_THE_FIRST_STEP) if starting else self._timeout
        if self._first_step is None or starting:
            return BEFORE_THE_FIRST_STEP
        outside = any(phase in OUTSIDE_STEPS for phase in phases)
        least = AT_LEAST_OUTSIDE_STEPS if outside else AT_LEAST
        return min(max(SLACK * self._longest, least), AT_MOST)

    def is_over(self, now: float, waiting: Collection[int] = ()) -> bool:
        """Whether the gang hangs: nobody moves, or somebody stands still who does not wait for others.

        One that waits while others move is in order: they may be evaluating, or writing a checkpoint. Who
        waits is known by its phase, or because it was asked.
        """
        if not self._watched:
            return False
        everyone = list(self._watched.values())
        deadline = self.deadline(one.status.phase for one in everyone)
        if all(now - one.moved > deadline for one in everyone):
            return True
        for rank, one in self._watched.items():
            since = one.heard if one.status.phase in WAITING or rank in waiting else one.moved
            if now - since > self.deadline([one.status.phase]):
                return True
        return False
