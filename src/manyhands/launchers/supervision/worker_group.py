"""Looks after one call of a gang, from the first hello to the last result, or to the verdict (law 5).

assemble ── call ── tend ──┬── all answered ──────────────── dismiss ── results
                     ▲     ├── bad news ── a moment for better ones ──┐
                     │     └── nobody moves ── "where are you?" ──────┼── abort ── kill ── verdict
                     └────── lose (launchers/supervision/worker_failures.py) ◀── it was spare ───────┘
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any, final

from manyhands.core.errors import ManyhandsError, WorkerFailedError
from manyhands.launchers.base import Supervision, WorkerProcesses
from manyhands.launchers.control.remote_calls import NONE, CallResult
from manyhands.launchers.control.server import ControlEvent, ControlServer
from manyhands.launchers.processes.worker_main import has_words
from manyhands.launchers.supervision import diagnosis
from manyhands.launchers.supervision.diagnosis import Ending, Why, WorkerState
from manyhands.launchers.supervision.status_page import StatusPage
from manyhands.launchers.supervision.watchdog import Watchdog
from manyhands.launchers.supervision.worker_failures import WorkerFailures

TICK = 0.1
AFTER_A_DEATH = 0.4  # seconds in which the others say what they were waiting in
IN_A_HURRY = 0.1  # the same where a starter sees it too: mpirun kills everybody a quarter of a second later
AFTER_AN_ERROR = 0.7  # seconds in which its cause may still be heard of
AFTER_OUR_ERROR = 2.0  # seconds for the others to finish on their own ...
WHILE_SAVING = 60.0  # ... and while one of them writes a checkpoint
CALM = 1.0  # seconds until they are asked again
SILENCE = 1.0  # seconds without a word after which the board knows better what a worker is doing
ANSWER = 0.7  # seconds to say where one is
ABORT = 1.0  # seconds from the order to leave to SIGKILL
REAP = 5.0  # seconds for the system to take back what was killed
ASLEEP = 2.0  # seconds between two looks after which the observer itself must have been stopped


@final
class WorkerGroup:
    """One call: made, tended and ended in the thread that calls `run`."""

    def __init__(
        self,
        hub: ControlServer,
        crew: WorkerProcesses,
        size: int,
        supervision: Supervision,
        stopping: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._hub, self._crew, self._size, self._care = hub, crew, size, supervision
        self._stopping = stopping  # the signal by which this process was asked to stop, once it was
        self._told_to_stop = False
        self._number = 0
        self._call: tuple[Any, ...] = ()
        self._known = [crew.known(rank) for rank in range(size)]
        self._answers: dict[int, CallResult] = {}
        self._lost: dict[int, float] = {}  # lines that closed, and when
        self._patience = Watchdog(supervision.timeout)
        self._board = StatusPage(size)
        self._losses = WorkerFailures(hub, crew, supervision, self._board, self._known)
        self._asked: float | None = None  # when everybody was asked where they are
        self._calm_until = 0.0
        self._looked = time.monotonic()

    def run(self, payload: bytes, number: int = 1, within: float = 300.0, hint: str = "") -> list[bytes]:
        """Everybody's answer, pickled; or the error that ended the gang. All have left when it returns."""
        self._number = number
        self._hub.begin(self._size)
        try:
            self._assemble(within, hint)
            hosts = tuple(one.host for one in self._known)
            self._call = ("call", number, hosts, payload, self._board.address)
            self._hub.send_all(*self._call)
            self._tend()
        except _VerdictError as found:
            raise found.error from None
        except BaseException:  # a second Ctrl-C, or whoever listens to the workers failed
            self._crew.kill_all()
            raise
        finally:
            self._board.close()
        return [self._answers.get(rank, NONE).value for rank in range(self._size)]

    def _assemble(self, within: float, hint: str) -> None:
        begun = time.monotonic()
        self._lost = {}
        while absent := [rank for rank in range(self._size) if rank not in self._hub.ranks]:
            now = self._listen()
            if any(one.bad_at is not None for one in self._known):
                self._fail()
            if now - begun > within:
                self._end(1)
                error = WorkerFailedError(diagnosis.missing(absent, self._size, within, hint), absent[0])
                raise _VerdictError(error)
        self._hub.close_door()
        self._crew.assembled()

    def _tend(self) -> None:
        while not self._is_over():
            now = self._listen()
            self._pass_on_stop()
            self._losses.replace()
            bad = self._bad()
            if self._losses.are_bearable(bad):
                for one in bad:
                    if self._losses.is_settled(one, now):
                        self._lose(one, now)
            elif bad:
                if self._is_settled(now):
                    self._fail()
            elif self._hangs(now):
                self._hang(now)
        self._losses.abandon()

    def _is_over(self) -> bool:
        """Whether all have answered who are not gone."""
        here = set(range(self._size)) - self._hub.gone
        return not self._bad() and here <= self._answers.keys()

    # ------------------------------------------------------------------ listening
    def _listen(self) -> float:
        """Take in all that comes within a tick."""
        now = self._take_all(TICK)
        for rank, ending in self._crew.ended().items():
            self._ended(rank, ending, now)
        patient = 1.0 if self._crew.certain else 0.0  # how it ended is told at any moment
        for rank, since in self._lost.items():
            if now - since >= patient:
                self._ended(rank, Ending("lost"), now)
        return now

    def _take_all(self, seconds: float) -> float:
        events = self._hub.poll(seconds)
        now = time.monotonic()
        if now - self._looked > ASLEEP:  # Ctrl-Z, a suspended laptop: nobody else stood still
            self._patience.excuse(now - self._looked)
        self._looked = now
        for event in events:
            self._take(event, now)
        return now

    def _take(self, event: ControlEvent, now: float) -> None:
        if not 0 <= event.rank < self._size:
            return
        one = self._known[event.rank]
        if event.kind == "hello":
            one.host, one.pid = event.content
            if event.rank in self._losses.coming:
                self._hub.send(event.rank, *self._call, self._hub.gone, self._hub.posted)
                if self._told_to_stop:
                    self._hub.send(event.rank, "stop", self._stopping())
        elif event.kind == "joined" and event.content[0] == self._number:
            self._losses.joined(event.rank)
        elif event.kind == "lost":
            self._lost[event.rank] = now
        elif event.kind == "where":
            (one.position,) = event.content
        elif event.kind == "news" and event.content[0] == self._number:
            _, status, told = event.content
            if status is not None:
                one.status = status
                self._patience.observe(event.rank, status, now)
            for message in told:
                self._care.hear(pickle.loads(message))  # noqa: S301 (from our own worker)
        elif event.kind == "answer" and event.content[0] == self._number:
            answer: CallResult = event.content[1]
            self._patience.release(event.rank)
            self._answers[event.rank] = answer
            one.returned = answer.failure is None
            if one.returned and self._care.spare:
                self._hub.retire(event.rank)
            if answer.failure is not None:
                one.failure = answer.failure
                one.bad_at = now

    def _ended(self, rank: int, ending: Ending, now: float) -> None:
        one = self._known[rank]
        if one.lost or rank in self._answers or (one.ending is not None and one.ending.kind != "lost"):
            return  # what it had to say is said
        self._patience.release(rank)
        one.pid = one.pid or self._crew.known(rank).pid
        one.began = rank in self._hub.who
        one.ending = ending
        one.status = self._board.read(rank) or one.status  # written to the last moment
        one.bad_at = now if one.bad_at is None else one.bad_at

    def _bad(self) -> list[WorkerState]:
        return [one for one in self._known if one.bad_at is not None]

    def _pass_on_stop(self) -> None:
        number = self._stopping()
        if number is not None and not self._told_to_stop:
            self._told_to_stop = True
            self._hub.send_all("stop", number)

    # ------------------------------------------------------------------ failing
    def _is_settled(self, now: float) -> bool:
        """Whether the news that will come has come."""
        bad = self._bad()
        if not any(_works(one) for one in self._known):
            return True
        cause = diagnosis.first_cause(self._known)
        if diagnosis.is_ours(cause):
            saving = any(
                one.status and one.status.phase == "checkpoint" for one in self._known if _works(one)
            )
            patient = WHILE_SAVING if saving else AFTER_OUR_ERROR
        elif cause.ending is not None:
            patient = AFTER_A_DEATH if self._crew.certain else IN_A_HURRY
        else:
            patient = AFTER_AN_ERROR
        return now - min(one.bad_at for one in bad if one.bad_at is not None) >= patient

    def _fail(self) -> None:
        """End the gang and raise what ended it."""
        bad = self._bad()
        since = min(one.bad_at for one in bad if one.bad_at is not None)
        cause = diagnosis.first_cause(self._known)
        error = cause.failure.error() if diagnosis.is_ours(cause) and cause.failure else None
        self._end(error.exit_code if isinstance(error, ManyhandsError) else 1)
        if isinstance(error, ManyhandsError):
            raise _VerdictError(error)
        cause = self._better_known(cause, bad)
        cause.wrote = has_words(cause.log)
        seconds = time.monotonic() - since
        raise _VerdictError(WorkerFailedError(diagnosis.failed(cause, self._known, seconds), cause.rank))

    def _better_known(self, cause: WorkerState, bad: list[WorkerState]) -> WorkerState:
        """A starter may know, when all is over, who was first, and by which signal."""
        if cause.ending is None or cause.ending.kind != "lost":
            return cause
        told = self._crew.ended()
        for one in bad:
            if one.rank in told and one.ending is not None:
                one.ending = told[one.rank]
                return one
        return cause

    # ------------------------------------------------------------------ losing
    def _lose(self, one: WorkerState, now: float, why: Why | None = None) -> None:
        """Go on without a worker, of whom nothing is left when the others are told."""
        if self._crew.severs:
            self._crew.sever(one.rank)
            until = time.monotonic() + ABORT
            while one.rank in self._hub.ranks and time.monotonic() < until:  # what it still had to say
                self._take_all(TICK / 4)
            self._hub.cut(one.rank)
        self._lost.pop(one.rank, None)
        self._patience.release(one.rank)
        self._patience.forgive(now)
        if one.returned:  # it died with its answer on the way
            one.ending = one.bad_at = None
            return
        if diagnosis.is_ours(one):  # its last word ends all of them
            return
        self._answers.pop(one.rank, None)
        at_work = any(_works(other) for other in self._known if other.rank not in {one.rank, *self._hub.gone})
        self._losses.lose(one, why, replace=at_work and not self._told_to_stop)

    # ------------------------------------------------------------------ hanging
    def _hangs(self, now: float) -> bool:
        """Whether nobody has moved for too long, and everybody has had time to say where they are."""
        for one in self._known:
            if self._patience.silent(one.rank, now) > SILENCE:
                self._patience.correct(one.rank, self._board.read(one.rank))
        if now < self._calm_until or not self._patience.is_over(now):
            self._asked = None
            return False
        if self._asked is None:
            self._asked = now
            for one in self._known:
                one.position = None
            self._hub.send_all("where")
        everyone = all(one.position for one in self._known if _works(one))
        if not everyone and now - self._asked <= ANSWER:
            return False
        # One may wait for another that moves, in a phase of which that could not be known.
        if self._patience.is_over(
            now, {one.rank for one in self._known if one.position and one.position.waiting}
        ):
            return True
        self._calm_until = now + CALM
        return False

    def _hang(self, now: float) -> None:
        for one in self._known:
            one.still, one.silent = self._patience.still(one.rank, now), self._patience.silent(one.rank, now)
            one.stopped = one.position is None and self._crew.is_stopped(one.rank)
        found = diagnosis.blame(self._known)
        if found.why == "silent":  # what it last said is older than what it last wrote
            for rank in found.ranks:
                self._known[rank].status = self._board.read(rank) or self._known[rank].status
        culprits = [self._known[rank] for rank in found.ranks]
        if self._crew.severs and self._losses.are_bearable(culprits):
            for one in culprits:
                self._lose(one, now, found.why)
            return
        self._end(1)
        message = diagnosis.hung(found, self._known, time.monotonic() - now)
        raise _VerdictError(WorkerFailedError(message, found.ranks[0] if found.ranks else None))

    # ------------------------------------------------------------------ ending
    def dismiss(self) -> None:
        """Send everybody home, and see that they go."""
        self._hub.send_all("end")
        self._see_off()

    def _end(self, code: int) -> None:
        """Let everybody leave at once, and kill who does not; what they still had to tell is heard."""
        self._losses.abandon()
        self._hub.send_all("abort", code)
        self._see_off()

    def _see_off(self) -> None:
        try:
            self._until_gone(ABORT)
            for rank in self._left():
                self._crew.kill(rank)
            self._until_gone(REAP)
        except WorkerFailedError:  # whoever had to tell us of their ends is gone, and they with it
            self._crew.kill_all()

    def _until_gone(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._left() and time.monotonic() < until:
            self._take_all(TICK / 4)

    def _left(self) -> list[int]:
        self._crew.ended()
        linked = self._hub.ranks
        return [rank for rank in range(self._size) if not self._crew.is_gone(rank, rank not in linked)]


def _works(one: WorkerState) -> bool:
    return not one.returned and not one.lost and one.bad_at is None


class _VerdictError(Exception):
    """Carries the error of a gang that has been ended past whoever ends it when anything else is raised."""

    def __init__(self, error: ManyhandsError) -> None:
        super().__init__(error)
        self.error = error
