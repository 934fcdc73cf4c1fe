"""Workers that somebody else has started: this process is one of them, and rank 0 leads.

What the workers write stays where the starter puts it; SIGINT and SIGTERM reach each of them by the starter.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, final

from manyhands.core.errors import UsageError
from manyhands.launchers.base import PLAIN, Supervision
from manyhands.launchers.control.remote_calls import pack, unpack
from manyhands.launchers.env import rendezvous
from manyhands.launchers.env.follower import EnvFollower
from manyhands.launchers.env.leader import EnvLeader
from manyhands.launchers.env.orphans import OrphanWatch
from manyhands.launchers.env.rendezvous import StarterInfo, detect
from manyhands.launchers.inline import InlineExecutor

GATHER = 300.0  # seconds for all ranks to come: a starter may be slow on some hosts


@final
class EnvLauncher:
    """This process and its peers, as torchrun, mpirun or Slurm have started them."""

    def __init__(self, gather: float = GATHER) -> None:
        """`gather` is how many seconds all ranks have to come."""
        found = detect(os.environ)
        if found is None:
            needed = ", ".join(rendezvous.TORCHRUN)
            raise UsageError(
                f"launcher env is for workers that torchrun ({needed}), mpirun or srun has started, "
                "and this process is not one of them"
            )
        if found.size > 1 and found.address and not found.meets_here:
            rendezvous.key_of(os.environ)  # now: before anything is made or waited for
        self._found, self._gather = found, gather
        self.leads = found.rank == 0
        _watch(found)

    def warm_up(self) -> None:
        """Every rank imports for itself."""

    def launch(
        self, function: Callable[..., Any], workers: int, *arguments: Any, supervision: Supervision = PLAIN
    ) -> list[Any]:
        """Run rank 0's function once a worker; every rank gets what each of them returned."""
        if not self.leads:
            return [
                unpack(rank, value)
                for rank, value in enumerate(_follower(self._found, self._gather).follow())
            ]
        if workers != self._found.size:
            raise UsageError(f"{self._found.starter} has started {self._found.size} workers, not {workers}")
        payload = pack(function, arguments, same_script=True)
        values = _leader(self._found).lead(payload, supervision, self._gather)
        return [unpack(rank, value) for rank, value in enumerate(values)]

    def executor(self, workers: int) -> Executor:
        """Ranks 1 and above run the calls that rank 0 submits; alone, rank 0 runs them itself.

        Where this process does not lead, it serves until the leader's executor is shut down; what it then
        gets is an executor that is shut down as well.
        """
        if not self.leads:
            _follower(self._found, self._gather).serve()
            closed = InlineExecutor()
            closed.shutdown()
            return closed
        return (
            InlineExecutor()
            if self._found.size == 1
            else _leader(self._found).executor(workers, self._gather)
        )


# One hub and one line a process, kept from launch to launch.
_leading: EnvLeader | None = None
_following: EnvFollower | None = None
_watching: OrphanWatch | None = None


def _watch(found: StarterInfo) -> OrphanWatch:
    global _watching  # noqa: PLW0603 (a process has one parent)
    if _watching is None:
        _watching = OrphanWatch(found, os.environ)
    return _watching


def _leader(found: StarterInfo) -> EnvLeader:
    global _leading  # noqa: PLW0603 (a process has one place in its job)
    if _leading is None:
        _leading = EnvLeader(found, _watch(found))
    return _leading


def _follower(found: StarterInfo, gather: float) -> EnvFollower:
    global _following  # noqa: PLW0603 (a process has one place in its job)
    if _following is None:
        _following = EnvFollower(found, gather, _watch(found))
    return _following
