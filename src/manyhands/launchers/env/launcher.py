"""Workers that another program started: this process is one of them, and rank 0 leads.

The output of the workers goes where that program sends it; SIGINT and SIGTERM reach each worker through it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, final

from manyhands.core.errors import UsageError
from manyhands.launchers.base import DEFAULT_SUPERVISION, SupervisionOptions
from manyhands.launchers.control.remote_calls import pack, unpack
from manyhands.launchers.env import rendezvous
from manyhands.launchers.env.follower import EnvFollower
from manyhands.launchers.env.leader import EnvLeader
from manyhands.launchers.env.parent_watch import ParentWatch
from manyhands.launchers.env.rendezvous import ClusterEnvironment, detect
from manyhands.launchers.inline import InlineExecutor

RENDEZVOUS_TIMEOUT = 300.0  # seconds for all ranks to connect: some hosts may start slowly


@final
class EnvLauncher:
    """This process and its peers, as torchrun, mpirun or Slurm started them."""

    def __init__(self, timeout: float = RENDEZVOUS_TIMEOUT) -> None:
        """`timeout`: seconds for all ranks to connect."""
        cluster = detect(os.environ)
        if cluster is None:
            needed = ", ".join(rendezvous.TORCHRUN)
            raise UsageError(
                f"launcher env needs a process that torchrun ({needed}), mpirun or srun started, "
                "and this process is not one of them"
            )
        if cluster.size > 1 and cluster.address and not cluster.meets_here:
            rendezvous.key_of(os.environ)  # now: before anything is created or waited for
        self._cluster, self._timeout = cluster, timeout
        self.leads = cluster.rank == 0
        _watch(cluster)

    def warm_up(self) -> None:
        """There is nothing to start: every rank imports for itself."""

    def launch(
        self,
        function: Callable[..., Any],
        workers: int,
        *arguments: Any,
        supervision: SupervisionOptions = DEFAULT_SUPERVISION,
    ) -> list[Any]:
        """Run rank 0's function once per worker; every rank gets the results of all."""
        if not self.leads:
            values = _follower(self._cluster, self._timeout).follow()
            return [unpack(rank, value) for rank, value in enumerate(values)]
        if workers != self._cluster.size:
            raise UsageError(f"{self._cluster.starter} started {self._cluster.size} workers, not {workers}")
        payload = pack(function, arguments, same_script=True)
        values = _leader(self._cluster).lead(payload, supervision, self._timeout)
        return [unpack(rank, value) for rank, value in enumerate(values)]

    def executor(self, workers: int) -> Executor:
        """Ranks 1 and above run the calls that rank 0 submits; alone, rank 0 runs them itself.

        A process that does not lead runs calls until the leader's executor is shut down, and gets an
        executor that is shut down as well.
        """
        if not self.leads:
            _follower(self._cluster, self._timeout).serve()
            closed = InlineExecutor()
            closed.shutdown()
            return closed
        if self._cluster.size == 1:
            return InlineExecutor()
        return _leader(self._cluster).executor(workers, self._timeout)


# One leader or follower per process, kept from launch to launch.
_the_leader: EnvLeader | None = None
_the_follower: EnvFollower | None = None
_the_watch: ParentWatch | None = None


def _watch(cluster: ClusterEnvironment) -> ParentWatch:
    global _the_watch  # noqa: PLW0603 (a process has one parent)
    if _the_watch is None:
        _the_watch = ParentWatch(cluster, os.environ)
    return _the_watch


def _leader(cluster: ClusterEnvironment) -> EnvLeader:
    global _the_leader  # noqa: PLW0603 (a process has one rank in its job)
    if _the_leader is None:
        _the_leader = EnvLeader(cluster, _watch(cluster))
    return _the_leader


def _follower(cluster: ClusterEnvironment, timeout: float) -> EnvFollower:
    global _the_follower  # noqa: PLW0603 (a process has one rank in its job)
    if _the_follower is None:
        _the_follower = EnvFollower(cluster, timeout, _watch(cluster))
    return _the_follower
