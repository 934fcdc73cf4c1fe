"""A view cannot end a study (law 12): one that raises is switched off with a warning."""

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
    """Calls a view until it fails; the view's callbacks are guarded by the run that calls them."""

    def __init__(self, view: StudyView) -> None:
        self._view: StudyView | None = view

    def begun(self, state: StudyState, folder: Path) -> None:
        self._show(lambda view: view.begun(state, folder))

    def callback(self, entry: CellState) -> Callback:
        """Return the view's callback, or one that does nothing if the view has failed."""
        found: list[Callback] = []
        self._show(lambda view: found.append(view.callback(entry)))
        return found[0] if found else Callback()

    def changed(self, entry: CellState) -> None:
        self._show(lambda view: view.changed(entry))

    def note(self, entry: CellState, text: str) -> None:
        self._show(lambda view: view.note(entry, text))

    def say(self, text: str) -> None:
        self._show(lambda view: view.say(text))

    def tick(self) -> None:
        self._show(lambda view: view.tick())

    def close(self) -> None:
        self._show(lambda view: view.close())

    def _show(self, what: Callable[[StudyView], object]) -> None:
        view = self._view
        if view is None:
            return
        try:
            what(view)
        except Exception as error:  # noqa: BLE001 (whatever it is, the study continues)
            self._view = None
            sentence = "the study's table was switched off: %s; the study continues without it"
            CALLBACKS.warning(sentence, reason_of(error))
