"""Ranks 1 and above of a job that another program started: they run what the leader sends."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import NoReturn, final

from manyhands.core.errors import ManyhandsError, WorkerFailedError
from manyhands.core.rank_info import RankInfo
from manyhands.launchers.control.client import Call, ControlClient
from manyhands.launchers.control.connection import Connection
from manyhands.launchers.control.handshake import connect_when_found, connect_with_retries
from manyhands.launchers.control.remote_calls import perform
from manyhands.launchers.env import rendezvous
from manyhands.launchers.env.parent_watch import CHECK, ParentWatch
from manyhands.launchers.env.rendezvous import ClusterEnvironment
from manyhands.launchers.supervision.diagnosis import exited, name
from manyhands.launchers.worker_state import ProcessExit, WorkerState

LEADER_PRINTS = 5.0  # seconds that the leader has to print its message


@final
class EnvFollower:
    """One connection to the leader, kept from launch to launch."""

    def __init__(self, cluster: ClusterEnvironment, timeout: float, watch: ParentWatch | None = None) -> None:
        self._cluster, self._watch = cluster, watch
        self._client = ControlClient(self._connect(timeout), cluster.rank, socket.gethostname(), self._end)
        self._client.armed = False

    def follow(self) -> list[bytes]:
        """Take part in the leader's next call, and return the pickled results of all ranks."""
        with self._armed():
            call = self._client.next_call()
            if isinstance(call, Call):
                self._answer(call)
                results = self._client.next_call()
                if isinstance(results, list):
                    return results
            raise WorkerFailedError(self._leader_lost())

    def serve(self) -> None:
        """Run the calls of the leader's executor, until it is shut down."""
        with self._armed():
            while isinstance(call := self._client.next_call(), Call):
                self._answer(call)

    def _answer(self, call: Call) -> None:
        info = RankInfo(self._cluster.rank, call.hosts, self._client) if call.hosts else None
        self._client.answer(perform(call.payload, info, through=(KeyboardInterrupt,)))

    def _connect(self, timeout: float) -> Connection:
        cluster = self._cluster
        if cluster.meets_here:
            path = rendezvous.rendezvous_file(cluster)
            return connect_when_found(
                lambda: rendezvous.read_file(path), timeout, f"worker 0 was not found through {path}"
            )
        if cluster.address:
            return connect_with_retries(cluster.address, rendezvous.key_of(os.environ), timeout)
        return connect_with_retries(*rendezvous.broadcast(None), timeout)

    @contextlib.contextmanager
    def _armed(self) -> Iterator[None]:
        """During a call this process ends with the leader; before and after, it does not."""
        if self._client.lost.is_set():
            raise WorkerFailedError(self._leader_lost())
        self._client.armed = True
        try:
            yield
        finally:
            self._client.armed = False

    def _end(self, code: int, lost: bool) -> NoReturn:
        """End this process without a message: the leader prints it, or rank 1 if the leader is gone."""
        if (
            not lost
        ):  # torchrun kills all when the first one ends: not before the leader has printed its message
            self._client.await_close(LEADER_PRINTS)
        elif self._watch is not None and self._watch.is_orphan():
            time.sleep(2 * CHECK)  # its thread prints what has happened, and ends this process
        elif self._cluster.rank == 1:
            print_error(ManyhandsError(self._leader_lost()))
        os._exit(code or 1)

    def _leader_lost(self) -> str:
        leader = WorkerState(0, *self._client.leader)
        return f"{name(leader, self._cluster.size)} {exited(ProcessExit('lost'))}"


def print_error(error: BaseException) -> None:
    """Print an error to stderr as the command line does, in a process that ends at once."""
    text = str(error).replace("\n", "\n       ")
    print(f"error: {text}", file=sys.stderr, flush=True)
