"""What a study's journal says about its cells and the machine, so that a stopped study can continue."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from manyhands.core.statistics import at_its_best
from manyhands.records.study_results import Block, Cell, block_of

Event = dict[str, Any]


class History:
    """The events of a journal, those of earlier sessions and new ones."""

    def __init__(self, events: Iterable[Event], host: str) -> None:
        self._host = host
        self._last: dict[str, Event] = {}  # the last event of each cell
        self._finished: dict[str, Event] = {}
        self._excluded: dict[str, str] = {}
        self._repeated: defaultdict[str, list[Event]] = defaultdict(list)
        self.calibrations: list[float] = []
        self.blocks: list[Block] = []
        self.sessions = 0
        for event in events:
            self.take(event)

    def take(self, event: Event) -> None:
        """Add an event."""
        match event["event"]:
            case "calibration":
                if event.get("host") == self._host:
                    self.calibrations.append(event["seconds"])
                return
            case "study":
                self.sessions += 1
            case "block":
                self.blocks.append(block_of(event, self.sessions))
                return
            case "finished":
                self._finished[event["cell"]] = event
            case "repeated":
                self._repeated[event["cell"]].append(event)
            case "excluded":
                self._excluded[event["cell"]] = event["reason"]
        if "cell" in event:
            self._last[event["cell"]] = event

    @property
    def best(self) -> float:
        """The time of a calibration when this machine is at its best."""
        return at_its_best(self.calibrations)

    @property
    def last(self) -> float:
        """The time of the last calibration."""
        return self.calibrations[-1]

    def finished(self, cell: Cell) -> Event | None:
        """The event that finished a cell; None if it was not timed then and is timed now."""
        event = self._finished.get(cell.key)
        return event if event and (event.get("timed", True) or not cell.timed) else None

    def is_finished(self, cell: Cell) -> bool:
        """Whether a cell need not be run."""
        return self.finished(cell) is not None

    def failed_run(self, cell: Cell) -> str | None:
        """The folder of a cell's last run, if that run failed."""
        event = self._last.get(cell.key, {})
        return event["run"] if event.get("event") == "failed" else None

    def excluded(self, cell: Cell) -> str | None:
        """Why a cell cannot work, if its last event says so."""
        event = self._last.get(cell.key, {})
        return self._excluded[cell.key] if event.get("event") == "excluded" else None

    def repeated(self, cell: Cell) -> list[Event]:
        """The events of a cell's runs that were too noisy."""
        return self._repeated[cell.key]

    def repeated_runs(self, cell: Cell) -> set[str]:
        """The folders of a cell's runs that were too noisy."""
        return {event["run"] for event in self._repeated[cell.key]}

    def free_name(self, cell: Cell) -> str:
        """The folder for a cell's next run: `...`; if that is taken, `...-again`, `...-again-2` and so on."""
        taken = self.repeated_runs(cell)
        ended = self._finished.get(cell.key)
        if ended and not self.is_finished(cell):
            taken.add(ended["run"])
        event = self._last.get(cell.key, {})
        if event.get("event") == "started" and event["run"] not in taken:
            return str(event["run"])  # it was stopped there, maybe by a version with other folder names
        more = (f"{cell.key}-again" + (f"-{k}" if k > 1 else "") for k in itertools.count(1))
        return next(name for name in itertools.chain([cell.key], more) if name not in taken)
