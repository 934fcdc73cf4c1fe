"""Who shows a study cannot end it either (law 12): a view that raises is switched off with a sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import final

from manyhands.followers import aloud, reason_of
from manyhands.progress import Silent
from manyhands.record import Observer
from manyhands.study.execute import View
from manyhands.study.sheet import Entry, Sheet


@final
class Guarded:
    """A view, until it fails; what it shows of a running cell goes through that run's followers."""

    def __init__(self, view: View) -> None:
        self._view: View | None = view

    def begun(self, sheet: Sheet, folder: Path) -> None:
        """Passed on."""
        self._show(lambda view: view.begun(sheet, folder))

    def observer(self, entry: Entry) -> Observer:
        """Its own, or nobody."""
        found: list[Observer] = []
        self._show(lambda view: found.append(view.observer(entry)))
        return found[0] if found else Silent()

    def changed(self, entry: Entry) -> None:
        """Passed on."""
        self._show(lambda view: view.changed(entry))

    def note(self, entry: Entry, text: str) -> None:
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

    def _show(self, what: Callable[[View], object]) -> None:
        view = self._view
        if view is None:
            return
        try:
            what(view)
        except Exception as error:  # noqa: BLE001 (whatever it is, the study goes on)
            self._view = None
            aloud(f"the study's table was switched off: {reason_of(error)}; the study goes on without it")
