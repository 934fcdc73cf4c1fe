"""The hang detector: how long workers may make no progress is learned from the pauses of a healthy run.

A step of this model on this machine takes as long as it takes: no fixed number of seconds is right for all.
So the deadline is a multiple of the longest pause after which a worker made progress again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import final

from manyhands.core.rank_info import RankStatus
from manyhands.launchers.supervision.diagnosis import WAITING

BEFORE_FIRST_STEP = 300.0  # seconds: data are fetched, kernels compiled, memory touched
SLACK = 20.0  # times the longest pause so far
MIN_DEADLINE, MAX_DEADLINE = 10.0, 600.0  # seconds
# In these phases a worker uses a disk, which may stall for longer than any step.
OUTSIDE_STEPS = ("checkpoint", "other")
MIN_DEADLINE_OUTSIDE_STEPS = 60.0


@dataclass
class _Watched:
    status: RankStatus
    first_step: int
    progress_at: float  # when it last made progress
    message_at: float  # when its last message arrived


@final
class Watchdog:
    """Gets every status with the time of its arrival, and says whether the group hangs."""

    def __init__(self, timeout: float | None = None) -> None:
        self._timeout = timeout
        self._watched: dict[int, _Watched] = {}
        self._first_step: float | None = None  # when the group made it
        self._longest_pause = 0.0

    def observe(self, rank: int, status: RankStatus, now: float) -> None:
        """A worker has sent its status."""
        one = self._watched.get(rank)
        if one is None:
            self._watched[rank] = _Watched(status, status.step, now, now)
            return
        if (status.moves, status.step) != (one.status.moves, one.status.step):
            # how long a start takes says nothing about steps; a replacement starts later than the others
            stepping = self._first_step is not None and one.progress_at >= self._first_step
            if stepping and one.status.phase != "starting":
                self._longest_pause = max(self._longest_pause, now - one.progress_at)
            one.progress_at = now
            if self._first_step is None and status.step > one.first_step:
                self._first_step = now
        one.status, one.message_at = status, now

    def correct(self, rank: int, status: RankStatus | None) -> None:
        """Replace the status of a worker that sends none by the one on its status page, if there is one."""
        if status is not None and rank in self._watched:
            one = self._watched[rank]
            one.status = status._replace(moves=one.status.moves)

    def release(self, rank: int) -> None:
        """Stop watching a worker that has returned, failed or ended."""
        self._watched.pop(rank, None)

    def discount(self, seconds: float) -> None:
        """The supervisor itself did not run for this long: that is not held against the workers."""
        for one in self._watched.values():
            one.progress_at += seconds
            one.message_at += seconds

    def restart_timers(self, now: float) -> None:
        """A worker was lost, and others may have waited for it: their pauses start now."""
        for one in self._watched.values():
            one.progress_at = now

    def stalled_for(self, rank: int, now: float) -> float:
        """Seconds since this worker made progress."""
        one = self._watched.get(rank)
        return now - one.progress_at if one else 0.0

    def silent_for(self, rank: int, now: float) -> float:
        """Seconds since its last message."""
        one = self._watched.get(rank)
        return now - one.message_at if one else 0.0

    def deadline(self, phases: Iterable[str] = ()) -> float:
        """Seconds that workers in these phases may make no progress."""
        phases = set(phases)
        starting = "starting" in phases
        if self._timeout is not None:  # meant for steps: how long fetching data takes is not known
            return max(self._timeout, BEFORE_FIRST_STEP) if starting else self._timeout
        if self._first_step is None or starting:
            return BEFORE_FIRST_STEP
        outside = any(phase in OUTSIDE_STEPS for phase in phases)
        least = MIN_DEADLINE_OUTSIDE_STEPS if outside else MIN_DEADLINE
        return min(max(SLACK * self._longest_pause, least), MAX_DEADLINE)

    def is_hung(self, now: float, waiting: Collection[int] = ()) -> bool:
        """Whether no worker makes progress, or one makes none that does not wait for others.

        A worker that waits while others make progress is healthy: they may be evaluating, or writing a
        checkpoint. It waits if its phase says so, or if its rank is in `waiting`, because it was asked.
        """
        if not self._watched:
            return False
        everyone = list(self._watched.values())
        deadline = self.deadline(one.status.phase for one in everyone)
        if all(now - one.progress_at > deadline for one in everyone):
            return True
        for rank, one in self._watched.items():
            since = one.message_at if one.status.phase in WAITING or rank in waiting else one.progress_at
            if now - since > self.deadline([one.status.phase]):
                return True
        return False
