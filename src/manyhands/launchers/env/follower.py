"""Ranks 1 and above of a job that somebody else has started: what is run, the leader says."""

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
from manyhands.launchers.control.remote_calls import perform
from manyhands.launchers.env import rendezvous
from manyhands.launchers.env.orphans import LOOK, OrphanWatch
from manyhands.launchers.env.rendezvous import StarterInfo
from manyhands.launchers.processes.worker_main import reach, reach_by
from manyhands.launchers.supervision.diagnosis import Ending, WorkerState, ended, name

LEADER_SPEAKS = 5.0  # seconds it has for that


@final
class EnvFollower:
    """One line to the leader, kept from launch to launch."""

    def __init__(self, found: StarterInfo, gather: float, watch: OrphanWatch | None = None) -> None:
        self._found, self._watch = found, watch
        self._link = ControlClient(self._meet(gather), found.rank, socket.gethostname(), self._leave)
        self._link.armed = False

    def follow(self) -> list[bytes]:
        """Take part in the leader's next call, and return what everybody returned."""
        with self._armed():
            call = self._link.next_call()
            if isinstance(call, Call):
                self._answer(call)
                results = self._link.next_call()
                if isinstance(results, list):
                    return results
            raise WorkerFailedError(self._lost_leader())

    def serve(self) -> None:
        """Run what the leader's executor sends, until it is shut down."""
        with self._armed():
            while isinstance(call := self._link.next_call(), Call):
                self._answer(call)

    def _answer(self, call: Call) -> None:
        info = RankInfo(self._found.rank, call.hosts, self._link) if call.hosts else None
        self._link.answer(perform(call.payload, info, through=(KeyboardInterrupt,)))

    def _meet(self, gather: float) -> Connection:
        found = self._found
        if found.meets_here:
            path = rendezvous.meeting_file(found)
            return reach_by(lambda: rendezvous.read_note(path), gather, f"worker 0 did not come to {path}")
        if found.address:
            return reach(found.address, rendezvous.key_of(os.environ), gather)
        return reach(*rendezvous.broadcast(None), gather)

    @contextlib.contextmanager
    def _armed(self) -> Iterator[None]:
        """While it works for the leader, it ends with it; before and after, its life is its own."""
        if self._link.lost.is_set():
            raise WorkerFailedError(self._lost_leader())
        self._link.armed = True
        try:
            yield
        finally:
            self._link.armed = False

    def _leave(self, code: int, lost: bool) -> NoReturn:
        """Quietly: the leader speaks for all, and when it is gone, rank 1 does."""
        if not lost:  # a starter kills all when the first one ends: not before the leader has spoken
            self._link.await_end(LEADER_SPEAKS)
        elif self._watch is not None and self._watch.is_orphan():
            time.sleep(2 * LOOK)  # the thread that watches says what has happened, and ends this process
        elif self._found.rank == 1:
            say(ManyhandsError(self._lost_leader()))
        os._exit(code or 1)

    def _lost_leader(self) -> str:
        leader = WorkerState(0, *self._link.leader)
        return f"{name(leader, self._found.size)} {ended(Ending('lost'))}"


def say(error: BaseException) -> None:
    """On stderr, as the command line does, by a process that ends at once."""
    text = str(error).replace("\n", "\n       ")
    print(f"error: {text}", file=sys.stderr, flush=True)
