"""The results of a study: its journal and the records of its cells, read without torch (law 8)."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from manyhands.core import file_locks
from manyhands.core.atomic_files import cannot_write, open_regular
from manyhands.core.errors import UsageError
from manyhands.records import reading, renames
from manyhands.records.record import RunRecord
from manyhands.records.run_folder import RunFolder
from manyhands.records.spec import RunSpec


class Cell(NamedTuple):
    """One run that a study asks for."""

    spec: RunSpec
    repeat: int = 0
    timed: bool = True  # it runs alone on the machine
    paired: bool = False  # it only measures speed, in blocks next to blocks of a baseline
    label: str = ""  # tells cells with equal specs apart

    @property
    def key(self) -> str:
        """Its name in the journal and as a folder: `mnist-mlp-7f3a2b1c09de`, for a repeat `...-2`.

        A paired cell is `...-speed`, because a run to the target may have the same spec.
        """
        marks = [*(["speed"] if self.paired else []), *([self.label] if self.label else [])]
        return "-".join([self.spec.name, *marks]) + self._time

    @property
    def old_key(self) -> str:
        """The key in a journal of version 0.1.0."""
        return self.spec.old_name + self._time

    @property
    def _time(self) -> str:
        return "" if self.repeat == 0 else f"-{self.repeat + 1}"

    def to_json(self) -> dict[str, Any]:
        """The cell as an object for the journal."""
        spec = self.spec.model_dump(mode="json", exclude_defaults=True)
        fields = {"spec": spec, "repeat": self.repeat, "timed": self.timed}
        more = {"paired": self.paired, "label": self.label}
        return fields | {name: value for name, value in more.items() if value}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Cell:
        """Read what `to_json` returned."""
        more = fields.get("paired", False), fields.get("label", "")
        return cls(RunSpec.of(**fields["spec"]), fields["repeat"], fields["timed"], *more)


class Without(NamedTuple):
    """A cell without a record, and the reason."""

    cell: Cell
    reason: str


class Block(NamedTuple):
    """A few seconds of a paired cell, while all other cells of the study slept.

    The blocks are in the order in which they were measured. A block of the baseline (one worker with one
    thread) comes before and after every other block, so that a ratio of neighbors cancels what the machine
    did meanwhile.
    """

    cell: str  # its key
    round: int  # 0 is the first; a round has one block of every cell that is still measured
    position: int  # in the round; the baseline has even ones
    samples_per_second: float  # between the ends of the workers' own steps
    steps: int  # that counted
    seconds: float
    session: int = 0  # blocks of different sessions are no neighbors


class Calibration(NamedTuple):
    """How long a fixed computation took on all cores, between two cells."""

    at: str
    seconds: float
    host: str = ""


@dataclass(frozen=True)
class Results:
    """The results of a study, finished or not: plain data for analyses, tables and reports."""

    folder: Path
    name: str
    title: str
    about: str = ""  # a sentence or two from the study's file
    claim: str | None = None  # the published claim that it tests
    price: float | None = None  # per worker and hour
    currency: str = "$"
    command: list[str] = field(default_factory=list)
    records: list[RunRecord] = field(default_factory=list)
    failed: list[Without] = field(default_factory=list)
    excluded: list[Without] = field(default_factory=list)
    left: list[Without] = field(default_factory=list)  # not run yet, or the time was up
    repeated: list[RunRecord] = field(default_factory=list)  # measured under heavy noise and then repeated
    calibrations: list[Calibration] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)  # of paired cells, in the order of their measurement


@dataclass(frozen=True)
class StudyFolder:
    """The folder of a study: `journal.jsonl`, one run folder per cell, and the report."""

    path: Path

    @property
    def journal(self) -> Path:
        """One line per event; lines are only appended."""
        return self.path / "journal.jsonl"

    def events(self) -> list[dict[str, Any]]:
        """All events of the journal, without a last line that a crash has cut off."""
        if not os.path.lexists(self.journal):
            return []
        return renames.update_cell_keys(reading.events(self.journal), _new_keys)

    @contextmanager
    def writing(self) -> Iterator[JournalWriter]:
        """Open the journal for appending; raise a UsageError if another process has it open."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = open_regular(self.journal, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            raise cannot_write(self.journal, error) from error
        with os.fdopen(descriptor, "a+b") as file:
            if not file_locks.take(descriptor):
                raise UsageError(
                    f"{self.path} is in use by another process: wait for it, or choose another --out"
                )
            yield JournalWriter(self.journal, file)

    def read(self) -> Results:
        """Return the results so far; a folder of runs without a journal is read as a study, too."""
        events = self.events()
        if not any(event["event"] == "study" for event in events):
            return self._without_journal()
        return _Reader(self, events).results()

    def record(self, event: dict[str, Any], cell: Cell | None = None) -> RunRecord | None:
        """The record of an event, with the fields that only the study knows; None if its folder is gone."""
        run = RunFolder(self.path / event["run"])
        record = run.record() if run.exists() else None
        if record is None:
            return None
        more: dict[str, Any] = {"run": str(run.path), "machine_noise": event.get("noise")}
        if cell is not None:
            # the times of a cell that ran next to others do not count
            more |= {"repeat": cell.repeat, "timed": cell.timed and event.get("timed", True)}
            more |= {"cell": cell.key, "paired": cell.paired, "label": cell.label}
        return record.model_copy(update=more)

    def _without_journal(self) -> Results:
        records = self._records()
        if not records:
            raise UsageError(f"{self.path} holds no study and no runs with a result")
        return Results(self.path, self.path.name, self.path.name, records=records)

    def _records(self) -> list[RunRecord]:
        if not self.path.is_dir():
            raise UsageError(f"there is no folder {self.path}")
        folders = [RunFolder(path) for path in sorted(self.path.iterdir()) if path.is_dir()]
        found = [(folder, folder.record()) for folder in folders if folder.exists()]
        # the path of the folder as it is now: the one in the file may be outdated or wrong
        return [record.model_copy(update={"run": str(folder.path)}) for folder, record in found if record]


def block_of(event: dict[str, Any], session: int) -> Block:
    """The block of a journal's event."""
    return Block(**{name: event[name] for name in Block._fields if name != "session"}, session=session)


def _new_keys(event: dict[str, Any]) -> dict[str, str]:
    """Map keys of version 0.1.0 to current keys, for the cells of a `study` event."""
    cells = [Cell.from_json(fields) for fields in event["cells"]]
    return {cell.old_key: cell.key for cell in cells}


class JournalWriter:
    """Appends events to the journal; each is on disk before `write` returns."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        end = file.seek(0, os.SEEK_END)
        file.seek(0)
        complete = file.read().rfind(b"\n") + 1
        if complete < end:  # a crash has cut off the last line
            file.truncate(complete)

    def write(self, event: str, **fields: Any) -> None:
        """Append one event."""
        at = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"event": event, "at": at, **fields}, separators=(",", ":")) + "\n"
        try:
            self._file.write(line.encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise cannot_write(self._path, error) from error


class _Reader:
    """Replays the journal; for each cell the last event counts."""

    def __init__(self, folder: StudyFolder, events: list[dict[str, Any]]) -> None:
        self._folder, self._events = folder, events
        self._study: dict[str, Any] = {}
        self._ended: dict[str, dict[str, Any]] = {}
        self._over: str | None = None  # why the last session did not run all cells
        self._noisy: list[dict[str, Any]] = []
        self._calibrations: list[Calibration] = []
        self._blocks: list[Block] = []
        self._session = 0
        for event in events:
            self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "study":
                self._study, self._over = event, None
                self._session += 1
            case "over":
                self._over = event["reason"]
            case "calibration":
                self._calibrations.append(Calibration(event["at"], event["seconds"], event.get("host", "")))
            case "block":
                self._blocks.append(block_of(event, self._session))
            case "finished" | "failed" | "excluded":
                self._ended[event["cell"]] = event
            case "repeated":
                self._noisy.append(event)

    def results(self) -> Results:
        study, folder = self._study, self._folder
        records = []
        sides: dict[str, list[Without]] = {"failed": [], "excluded": [], "left": []}
        for cell in map(Cell.from_json, study["cells"]):
            event = self._ended.get(cell.key)
            record = folder.record(event, cell) if event and event["event"] == "finished" else None
            if record is not None:
                records.append(record)
            elif event and event["event"] != "finished":
                sides[event["event"]].append(Without(cell, event["reason"]))
            else:
                sides["left"].append(Without(cell, self._over or "not run yet"))
        counted = {event.get("run") for event in self._ended.values() if event["event"] == "finished"}
        noisy = [event for event in self._noisy if event["run"] not in counted]
        repeated = [record for event in noisy if (record := folder.record(event))]
        names = ("name", "title", "about", "claim", "price", "currency", "command")
        facts = {name: study[name] for name in names if study.get(name) is not None}
        return Results(
            folder.path,
            **facts,
            records=records,
            repeated=repeated,
            calibrations=self._calibrations,
            blocks=self._blocks,
            failed=sides["failed"],
            excluded=sides["excluded"],
            left=sides["left"],
        )
