"""Failures that a worker group survives: which workers may be lost, which are replaced, what the others get.

running ── dies, raises, hangs ──▶ gone ──┬── no replacement: its result is None
   ▲                                      └── a new process ── hello, call ── `joined` ──┐
   └────────────────────────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from manyhands.launchers.base import GroupProcesses, SupervisionOptions
from manyhands.launchers.control.server import ControlServer
from manyhands.launchers.control.status_page import StatusPage
from manyhands.launchers.supervision import diagnosis
from manyhands.launchers.supervision.diagnosis import HangReason
from manyhands.launchers.worker_logs import has_output
from manyhands.launchers.worker_state import WorkerState

WAIT_FOR_CAUSE = 0.7  # seconds in which the failure that caused this one may still be reported


@final
class WorkerFailures:
    """Removes and adds workers; shares the states of all workers with the worker group, in its thread."""

    def __init__(
        self,
        server: ControlServer,
        processes: GroupProcesses,
        supervision: SupervisionOptions,
        status_page: StatusPage,
        workers: list[WorkerState],
    ) -> None:
        self._server, self._processes, self._supervision = server, processes, supervision
        self._status_page, self._workers = status_page, workers
        self._expendable = supervision.expendable & set(range(len(workers)))
        self._replaced = 0
        self._to_restart: dict[int, int] = {}  # the number of the replacement, by rank
        self.joining: set[int] = set()  # ranks whose replacement was started and has not joined

    def are_survivable(self, failed: Sequence[WorkerState]) -> bool:
        """Whether the group continues without these: all may be lost and have started, and enough remain."""
        left = self._expendable - self._server.gone - {one.rank for one in failed}
        return (
            bool(failed)
            and len(left) >= self._supervision.min_remaining
            and all(self._is_survivable(one) for one in failed)
        )

    def is_own(self, one: WorkerState, now: float) -> bool:
        """Whether no other failure can be its cause: that may be the failure of a rank that is needed."""
        waited = one.failed_at is not None and now - one.failed_at >= WAIT_FOR_CAUSE
        return not diagnosis.is_consequence(one) or waited

    def lose(self, one: WorkerState, reason: HangReason | None, replace: bool) -> None:
        """Remove a worker of which nothing is left, and tell the other workers and the user."""
        self.joining.discard(one.rank)
        replacement = None
        if replace and self._processes.can_restart and self._replaced < self._supervision.max_replacements:
            self._replaced += 1
            self._to_restart[one.rank] = self._replaced
            replacement = (self._replaced, self._supervision.max_replacements)
        one.lost, one.failed_at = True, None
        one.has_output = has_output(one.log)
        self._server.mark_gone(one.rank)
        loss = diagnosis.loss(one, len(self._workers), reason, replacement)
        self._supervision.on_notice("\n".join([loss.sentence, *loss.details]))
        self._supervision.on_lost(one.rank, loss.sentence)

    def start_replacements(self) -> None:
        """Start new processes for lost ranks whose process is gone; they are called when they say hello."""
        connected = self._server.connected
        for rank in [
            each for each in self._to_restart if self._processes.is_gone(each, each not in connected)
        ]:
            number = self._to_restart.pop(rank)
            self._server.identities.pop(rank, None)
            self._status_page.clear(rank)
            title = f"of {len(self._workers)}, replacement {number} of {self._supervision.max_replacements}"
            self._processes.start([rank], title)
            self._workers[rank] = self._processes.describe(rank)
            self._workers[rank].is_replacement = True
            self.joining.add(rank)

    def joined(self, rank: int) -> None:
        """A replacement takes part from now on."""
        if rank in self.joining:
            self.joining.discard(rank)
            self._server.mark_joined(rank)

    def abandon(self) -> None:
        """The call is over, or about to be: replacements that have not joined are not needed."""
        self._to_restart.clear()
        for rank in self.joining:
            self._processes.kill(rank)
        self.joining.clear()

    def _is_survivable(self, one: WorkerState) -> bool:
        started = one.is_replacement or (one.status is not None and one.status.phase != "starting")
        return started and one.rank in self._expendable and not diagnosis.is_ours(one)
