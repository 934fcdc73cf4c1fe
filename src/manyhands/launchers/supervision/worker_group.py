"""One call of a worker group, from the first hello to the last result, or to the error that ends it (law 5).

assemble ── call ── supervise ──┬── all have answered ──────────── dismiss ── results
                         ▲      ├── a failure ── wait for its cause ───┐
                         │      └── no progress ── "where are you?" ───┼── abort ── kill ── error
                         └────── lose the worker (worker_failures.py) ◀── others survive it
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any, final

from manyhands.core.errors import ManyhandsError, WorkerFailedError
from manyhands.core.rank_info import ENOUGH
from manyhands.launchers.base import GroupProcesses, SupervisionOptions
from manyhands.launchers.control.remote_calls import NONE, CallResult
from manyhands.launchers.control.server import ControlEvent, ControlServer
from manyhands.launchers.control.status_page import StatusPage
from manyhands.launchers.supervision import diagnosis
from manyhands.launchers.supervision.diagnosis import HangReason
from manyhands.launchers.supervision.watchdog import Watchdog
from manyhands.launchers.supervision.worker_failures import WorkerFailures
from manyhands.launchers.worker_logs import has_output
from manyhands.launchers.worker_state import ProcessExit, WorkerState

# All in seconds.
TICK = 0.1
AFTER_EXIT = 0.4  # for the other workers to report what they were waiting in
AFTER_EXIT_UNREPORTED = 0.1  # the same where mpirun sees it too, and kills all others a quarter second later
AFTER_ERROR = 0.7  # for the cause of the error to be reported
AFTER_OUR_ERROR = 2.0  # for the others to finish on their own ...
WHILE_SAVING = 60.0  # ... and while one of them writes a checkpoint
ASK_AGAIN = 1.0  # until workers are asked for their position again
SILENCE = 1.0  # without a message until the status page is read instead
ANSWER = 0.7  # for a worker to answer with its position
ABORT = 1.0  # from the order to leave to SIGKILL
REAP = 5.0  # for the system to remove killed processes
SUSPENDED = 2.0  # between two polls: the supervisor itself must have been stopped


@final
class WorkerGroup:
    """One call: started, supervised and ended in the thread that calls `run`."""

    def __init__(
        self,
        server: ControlServer,
        processes: GroupProcesses,
        size: int,
        supervision: SupervisionOptions,
        stop_signal: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._server, self._processes, self._size = server, processes, size
        self._supervision = supervision
        self._stop_signal = stop_signal  # returns the signal that asked this process to stop, if any
        self._stop_sent = False
        self._number = 0
        self._call: tuple[Any, ...] = ()
        self._workers = [processes.describe(rank) for rank in range(size)]
        self._results: dict[int, CallResult] = {}
        self._disconnected: dict[int, float] = {}  # when, by rank
        self._watchdog = Watchdog(supervision.timeout)
        self._status_page = StatusPage(size)
        self._failures = WorkerFailures(server, processes, supervision, self._status_page, self._workers)
        self._asked_at: float | None = None  # when all workers were asked for their position
        self._ask_not_before = 0.0
        self._polled_at = time.monotonic()

    def run(self, payload: bytes, number: int = 1, within: float = 300.0, hint: str = "") -> list[bytes]:
        """The pickled results by rank, or the error that ended the group. All have left when it returns."""
        self._number = number
        self._server.start_call(self._size)
        try:
            self._assemble(within, hint)
            hosts = tuple(one.host for one in self._workers)
            self._call = ("call", number, hosts, payload, self._status_page.address)
            self._server.send_all(*self._call)
            self._supervise()
        except _GroupEndedError as ended:
            raise ended.error from None
        except BaseException:  # a second Ctrl-C, or a callback of the supervision failed
            self._processes.kill_all()
            raise
        finally:
            self._status_page.close()
        return [self._results.get(rank, NONE).value for rank in range(self._size)]

    def _assemble(self, within: float, hint: str) -> None:
        started = time.monotonic()
        self._disconnected = {}
        while absent := [rank for rank in range(self._size) if rank not in self._server.connected]:
            now = self._poll()
            if any(one.failed_at is not None for one in self._workers):
                self._fail()
            if now - started > within:
                self._end(1)
                message = diagnosis.missing(absent, self._size, within, hint)
                raise _GroupEndedError(WorkerFailedError(message, absent[0]))
        self._server.stop_listening()
        self._processes.all_connected()

    def _supervise(self) -> None:
        while not self._is_over():
            now = self._poll()
            self._pass_on_stop()
            self._failures.start_replacements()
            failed = self._failed()
            if self._failures.are_survivable(failed):
                for one in failed:
                    if self._failures.is_own(one, now):
                        self._lose(one, now)
            elif failed:
                if self._cause_is_known(now):
                    self._fail()
            elif self._hangs(now):
                self._handle_hang(now)
        self._failures.abandon()

    def _is_over(self) -> bool:
        """Whether all workers that are not gone have answered."""
        present = set(range(self._size)) - self._server.gone
        return not self._failed() and present <= self._results.keys()

    # ------------------------------------------------------------------ receiving
    def _poll(self) -> float:
        """Take all events of a tick, and look for processes that ended."""
        now = self._take_events(TICK)
        for rank, exit_ in self._processes.exits().items():
            self._exited(rank, exit_, now)
        grace = 1.0 if self._processes.reports_exits else 0.0  # the exit itself is about to be reported
        for rank, since in self._disconnected.items():
            if now - since >= grace:
                self._exited(rank, ProcessExit("lost"), now)
        return now

    def _take_events(self, seconds: float) -> float:
        events = self._server.poll(seconds)
        now = time.monotonic()
        if now - self._polled_at > SUSPENDED:  # Ctrl-Z, a suspended laptop: the workers did not hang
            self._watchdog.discount(now - self._polled_at)
        self._polled_at = now
        for event in events:
            self._take(event, now)
        return now

    def _take(self, event: ControlEvent, now: float) -> None:
        if not 0 <= event.rank < self._size:
            return
        one = self._workers[event.rank]
        if event.kind == "hello":
            one.host, one.pid = event.content
            if event.rank in self._failures.joining:
                self._server.send(event.rank, *self._call, self._server.gone, self._server.posted)
                if self._stop_sent:
                    self._server.send(event.rank, "stop", self._asked_to_stop())
        elif event.kind == "joined" and event.content[0] == self._number:
            self._failures.joined(event.rank)
        elif event.kind == "lost":
            self._disconnected[event.rank] = now
        elif event.kind == "position":
            (one.position,) = event.content
        elif event.kind == "report" and event.content[0] == self._number:
            _, status, messages = event.content
            if status is not None:
                one.status = status
                self._watchdog.observe(event.rank, status, now)
            for message in messages:
                self._supervision.on_message(pickle.loads(message))  # noqa: S301 (from our own worker)
        elif event.kind == "result" and event.content[0] == self._number:
            result: CallResult = event.content[1]
            self._watchdog.release(event.rank)
            self._results[event.rank] = result
            one.returned = result.failure is None
            if one.returned and self._supervision.expendable:
                self._server.mark_returned(event.rank)
            if result.failure is not None:
                one.failure = result.failure
                one.failed_at = now

    def _exited(self, rank: int, exit_: ProcessExit, now: float) -> None:
        one = self._workers[rank]
        if one.lost or rank in self._results or (one.exit is not None and one.exit.kind != "lost"):
            return  # nothing new
        self._watchdog.release(rank)
        one.pid = one.pid or self._processes.describe(rank).pid
        one.connected = rank in self._server.identities
        one.exit = exit_
        one.status = self._status_page.read(rank) or one.status  # written until the last moment
        one.failed_at = now if one.failed_at is None else one.failed_at

    def _failed(self) -> list[WorkerState]:
        return [one for one in self._workers if one.failed_at is not None]

    def _pass_on_stop(self) -> None:
        number = self._asked_to_stop()
        if number is not None and not self._stop_sent:
            self._stop_sent = True
            self._server.send_all("stop", number)

    def _asked_to_stop(self) -> int | None:
        """The signal that this process got, or ENOUGH if the work may end."""
        number = self._stop_signal()
        return ENOUGH if number is None and self._supervision.enough() else number

    # ------------------------------------------------------------------ failing
    def _cause_is_known(self, now: float) -> bool:
        """Whether there was enough time for reports that explain the failure."""
        failed = self._failed()
        if not any(_is_running(one) for one in self._workers):
            return True
        cause = diagnosis.first_cause(self._workers)
        if diagnosis.is_ours(cause):
            saving = any(
                one.status and one.status.phase == "checkpoint" for one in self._workers if _is_running(one)
            )
            seconds = WHILE_SAVING if saving else AFTER_OUR_ERROR
        elif cause.exit is not None:
            seconds = AFTER_EXIT if self._processes.reports_exits else AFTER_EXIT_UNREPORTED
        else:
            seconds = AFTER_ERROR
        return now - min(one.failed_at for one in failed if one.failed_at is not None) >= seconds

    def _fail(self) -> None:
        """End the group and raise the error that ended it."""
        failed = self._failed()
        since = min(one.failed_at for one in failed if one.failed_at is not None)
        cause = diagnosis.first_cause(self._workers)
        error = cause.failure.error() if diagnosis.is_ours(cause) and cause.failure else None
        self._end(error.exit_code if isinstance(error, ManyhandsError) else 1)
        if isinstance(error, ManyhandsError):
            raise _GroupEndedError(error)
        cause = self._with_reported_exit(cause, failed)
        cause.has_output = has_output(cause.log)
        message = diagnosis.failed(cause, self._workers, time.monotonic() - since)
        raise _GroupEndedError(WorkerFailedError(message, cause.rank))

    def _with_reported_exit(self, cause: WorkerState, failed: list[WorkerState]) -> WorkerState:
        """mpirun reports, when all processes have ended, which one was the first, and its signal."""
        if cause.exit is None or cause.exit.kind != "lost":
            return cause
        exits = self._processes.exits()
        for one in failed:
            if one.rank in exits and one.exit is not None:
                one.exit = exits[one.rank]
                return one
        return cause

    # ------------------------------------------------------------------ losing a worker
    def _lose(self, one: WorkerState, now: float, reason: HangReason | None = None) -> None:
        """Continue without a worker; nothing is left of it when the others are told."""
        if self._processes.can_kill_alone:
            self._processes.kill_alone(one.rank)
            until = time.monotonic() + ABORT
            while one.rank in self._server.connected and time.monotonic() < until:  # its last messages
                self._take_events(TICK / 4)
            self._server.disconnect(one.rank)
        self._disconnected.pop(one.rank, None)
        self._watchdog.release(one.rank)
        self._watchdog.restart_timers(now)
        if one.returned:  # it died while its result was on the way
            one.exit = one.failed_at = None
            return
        if diagnosis.is_ours(one):  # its last message ends the group
            return
        self._results.pop(one.rank, None)
        absent = {one.rank, *self._server.gone}
        running = any(_is_running(other) for other in self._workers if other.rank not in absent)
        self._failures.lose(one, reason, replace=running and not self._stop_sent)

    # ------------------------------------------------------------------ hanging
    def _hangs(self, now: float) -> bool:
        """Whether the watchdog has expired, and workers have had time to answer with their position."""
        for one in self._workers:
            if self._watchdog.silent_for(one.rank, now) > SILENCE:
                self._watchdog.correct(one.rank, self._status_page.read(one.rank))
        if now < self._ask_not_before or not self._watchdog.is_hung(now):
            self._asked_at = None
            return False
        if self._asked_at is None:
            self._asked_at = now
            for one in self._workers:
                one.position = None
            self._server.send_all("position")
        all_answered = all(one.position for one in self._workers if _is_running(one))
        if not all_answered and now - self._asked_at <= ANSWER:
            return False
        # A worker may wait for another that makes progress, in a phase that does not say so.
        waiting = {one.rank for one in self._workers if one.position and one.position.waiting}
        if self._watchdog.is_hung(now, waiting):
            return True
        self._ask_not_before = now + ASK_AGAIN
        return False

    def _handle_hang(self, now: float) -> None:
        for one in self._workers:
            one.stalled_for = self._watchdog.stalled_for(one.rank, now)
            one.silent_for = self._watchdog.silent_for(one.rank, now)
            one.stopped = one.position is None and self._processes.is_stopped(one.rank)
        found = diagnosis.blame(self._workers)
        if found.reason == "silent":  # the status page is newer than its last message
            for rank in found.ranks:
                self._workers[rank].status = self._status_page.read(rank) or self._workers[rank].status
        culprits = [self._workers[rank] for rank in found.ranks]
        if self._processes.can_kill_alone and self._failures.are_survivable(culprits):
            for one in culprits:
                self._lose(one, now, found.reason)
            return
        self._end(1)
        message = diagnosis.hung(found, self._workers, time.monotonic() - now)
        raise _GroupEndedError(WorkerFailedError(message, found.ranks[0] if found.ranks else None))

    # ------------------------------------------------------------------ ending
    def dismiss(self) -> None:
        """Tell all workers that there are no more calls, and wait until they have left."""
        self._server.send_all("end")
        self._wait_or_kill()

    def _end(self, code: int) -> None:
        """Let all workers leave at once, and kill those that do not; their last messages are still taken."""
        self._failures.abandon()
        self._server.send_all("abort", code)
        self._wait_or_kill()

    def _wait_or_kill(self) -> None:
        try:
            self._wait_until_gone(ABORT)
            for rank in self._remaining():
                self._processes.kill(rank)
            self._wait_until_gone(REAP)
        except WorkerFailedError:  # the process that reports exits is gone, and its workers with it
            self._processes.kill_all()

    def _wait_until_gone(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._remaining() and time.monotonic() < until:
            self._take_events(TICK / 4)

    def _remaining(self) -> list[int]:
        self._processes.exits()
        connected = self._server.connected
        return [
            rank for rank in range(self._size) if not self._processes.is_gone(rank, rank not in connected)
        ]


def _is_running(one: WorkerState) -> bool:
    return not one.returned and not one.lost and one.failed_at is None


class _GroupEndedError(Exception):
    """Carries the error of a group that has been ended past the handler that kills what is left."""

    def __init__(self, error: ManyhandsError) -> None:
        super().__init__(error)
        self.error = error
