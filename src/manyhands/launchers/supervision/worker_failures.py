"""The workers that a gang can go on without: who may be lost, who comes in their place, what the others hear.

at work ── dies, raises, hangs ──▶ gone ──┬── nobody comes: its result is None
   ▲                                      └── a new process ── hello, call ── `joined` ──┐
   └────────────────────────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from manyhands.launchers.base import Supervision, WorkerProcesses
from manyhands.launchers.control.server import ControlServer
from manyhands.launchers.processes.worker_main import has_words
from manyhands.launchers.supervision import diagnosis
from manyhands.launchers.supervision.diagnosis import Why, WorkerState
from manyhands.launchers.supervision.status_page import StatusPage

CAUSE = 0.7  # seconds in which the failure may still be heard of that one only noticed


@final
class WorkerFailures:
    """Counts out and in; what is known of all workers is shared with the gang, and tended in its thread."""

    def __init__(
        self,
        hub: ControlServer,
        crew: WorkerProcesses,
        supervision: Supervision,
        board: StatusPage,
        known: list[WorkerState],
    ) -> None:
        self._hub, self._crew, self._care, self._board, self._known = hub, crew, supervision, board, known
        self._spare = supervision.spare & set(range(len(known)))
        self._replaced = 0
        self._awaited: dict[int, int] = {}  # ranks to start again, as which replacement
        self.coming: set[int] = set()  # ranks that were started again and have not joined

    def are_bearable(self, some: Sequence[WorkerState]) -> bool:
        """Whether the gang goes on without these: all are spare and have begun, and enough of them stay."""
        left = self._spare - self._hub.gone - {one.rank for one in some}
        return bool(some) and len(left) >= self._care.remain and all(self._is_bearable(one) for one in some)

    def is_settled(self, one: WorkerState, now: float) -> bool:
        """Whether its failure is its own, as far as one can know: it may come from one that is not spare."""
        return not diagnosis.is_consequence(one) or (one.bad_at is not None and now - one.bad_at >= CAUSE)

    def lose(self, one: WorkerState, why: Why | None, replace: bool) -> None:
        """Count a worker out, of whom nothing is left, and say so to everybody."""
        self.coming.discard(one.rank)
        successor = None
        if replace and self._crew.restarts and self._replaced < self._care.replacements:
            self._replaced += 1
            self._awaited[one.rank] = self._replaced
            successor = (self._replaced, self._care.replacements)
        one.lost, one.bad_at = True, None
        one.wrote = has_words(one.log)
        self._hub.excuse(one.rank)
        said = diagnosis.loss(one, len(self._known), why, successor)
        self._care.notice("\n".join([said.sentence, *said.details]))
        self._care.lost(one.rank, said.sentence)

    def replace(self) -> None:
        """Start those again whose last process has been taken back; they say hello, and are called then."""
        for rank in [rank for rank in self._awaited if self._crew.is_gone(rank, rank not in self._hub.ranks)]:
            number = self._awaited.pop(rank)
            self._hub.who.pop(rank, None)
            self._board.wipe(rank)
            title = f"of {len(self._known)}, joins ({number} of {self._care.replacements})"
            self._crew.start([rank], title)
            self._known[rank] = self._crew.known(rank)
            self._known[rank].joins = True
            self.coming.add(rank)

    def joined(self, rank: int) -> None:
        """One that came later says that it takes part."""
        if rank in self.coming:
            self.coming.discard(rank)
            self._hub.admit(rank)

    def abandon(self) -> None:
        """The gang is over, or about to be: who has not joined by now is not needed."""
        self._awaited.clear()
        for rank in self.coming:
            self._crew.kill(rank)
        self.coming.clear()

    def _is_bearable(self, one: WorkerState) -> bool:
        begun = one.joins or (one.status is not None and one.status.phase != "starting")
        return begun and one.rank in self._spare and not diagnosis.is_ours(one)
