"""Ranks 1 and above of a job that somebody else has started: what is run, the leader says."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from typing import NoReturn, final

from manyhands.errors import ManyhandsError, WorkerFailedError
from manyhands.launchers import rendezvous
from manyhands.launchers.calls import perform
from manyhands.launchers.link import Call, Link
from manyhands.launchers.rank import reach
from manyhands.launchers.rendezvous import Found
from manyhands.launchers.verdict import Ending, Known, ended, name
from manyhands.place import Place

LEADER_SPEAKS = 5.0  # seconds it has for that


@final
class Follower:
    """One line to the leader, kept from launch to launch."""

    def __init__(self, found: Found, gather: float) -> None:
        self._found = found
        wire = reach(*self._meeting_place(gather), gather)
        self._link = Link(wire, found.rank, socket.gethostname(), self._leave)
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
        place = Place(self._found.rank, call.hosts, self._link) if call.hosts else None
        self._link.answer(perform(call.payload, place, through=(KeyboardInterrupt,)))

    def _meeting_place(self, gather: float) -> tuple[str, bytes]:
        found = self._found
        if found.address:
            return found.address, rendezvous.key_of(found, os.environ)
        if found.one_host:
            return rendezvous.await_note(rendezvous.meeting_file(found), gather)
        return rendezvous.broadcast(None)

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
        elif self._found.rank == 1:
            say(ManyhandsError(self._lost_leader()))
        os._exit(code or 1)

    def _lost_leader(self) -> str:
        leader = Known(0, *self._link.leader)
        return f"{name(leader, self._found.size)} {ended(Ending('lost'))}"


def say(error: BaseException) -> None:
    """On stderr, as the command line does, by a process that ends at once."""
    text = str(error).replace("\n", "\n       ")
    print(f"error: {text}", file=sys.stderr, flush=True)
