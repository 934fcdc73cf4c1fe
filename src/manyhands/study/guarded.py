"""Who shows a study cannot end it either (law 12): a view that raises is switched off with a sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import final

from manyhands.callbacks.background import reason_of
from manyhands.callbacks.base import Callback
from manyhands.callbacks.log import CALLBACKS
from manyhands.study.execute import StudyView
from manyhands.study.study_state import CellState, StudyState


@final
class Guarded:
    """A view, until it fails; what it shows of a running cell goes through that run's followers."""

    def __init__(self, view: StudyView) -> None:
        self._view: StudyView | None = view

    def begun(self, sheet: StudyState, folder: Path) -> None:
        """Passed on."""
        self._show(lambda view: view.begun(sheet, folder))

    def callback(self, entry: CellState) -> Callback:
        """Its own, or nobody."""
        found: list[Callback] = []
        self._show(lambda view: found.append(view.callback(entry)))
        return found[0] if found else Callback()

    def changed(self, entry: CellState) -> None:
        """Passed on."""
        self._show(lambda view: view.changed(entry))

    def note(self, entry: CellState, text: str) -> None:
        """Passed on."""
        self._show(lambda view: view.note(entry, text))

    def say(self, text: str) -> None:
        """Passed on."""
        self._show(lambda view: view.say(text))

    def tick(self) -> None:
        """Passed on."""
        self._show(lambda view: view.tick())

    def close(self) -> None:
        """Passed on."""
        self._show(lambda view: view.close())

    def _show(self, what: Callable[[StudyView], object]) -> None:
        view = self._view
        if view is None:
            return
        try:
            what(view)
        except Exception as error:  # noqa: BLE001 (whatever it is, the study goes on)
            self._view = None
            reason = reason_of(error)
            CALLBACKS.warning("the study's table was switched off: %s; the study goes on without it", reason)
