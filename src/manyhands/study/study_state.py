"""The state of a running study: every cell and its outcome, as the views show it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from manyhands.core import formatting
from manyhands.records.record import RunRecord
from manyhands.records.spec import RunSpec
from manyhands.records.study_results import Block, Cell
from manyhands.study.study_file import Study

State = Literal["left", "running", "finished", "failed", "excluded"]


@dataclass
class CellState:
    """The state of one cell."""

    cell: Cell
    state: State = "left"
    record: RunRecord | None = None
    reason: str = ""  # why it failed or cannot work
    earlier: bool = False  # it was finished before this session


@dataclass
class StudyState:
    """The states of all cells, in the order in which they run."""

    study: Study
    entries: dict[str, CellState] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)  # of paired cells

    def of(self, *states: State) -> list[CellState]:
        """The cells that are in one of these states."""
        return [entry for entry in self.entries.values() if entry.state in states]

    @property
    def records(self) -> list[RunRecord]:
        """The records of the finished cells."""
        return [entry.record for entry in self.of("finished") if entry.record is not None]


def title(spec: RunSpec, seed: bool = True) -> str:
    """A short title of a cell: the settings that distinguish it from other cells of a study."""
    own = {name: value for name, value in spec.options.items() if name != "data"}  # `data` is a long path
    options = [f"{name}={value}" for name, value in {**own, **spec.strategy_options}.items()]
    parts = [
        spec.task,
        " ".join([spec.strategy, *options, *_transport_words(spec)]),
        formatting.plural(spec.workers, "worker"),
        formatting.plural(spec.threads, "thread") if spec.threads else "",
        f"batch {spec.batch:,}" if spec.batch else "",
        spec.recipe or "",
        *(f"{name} {value}" for name, value in spec.recipe_options.items()),
        f"offload {spec.offload}" if spec.offload != "none" else "",
        f"seed {spec.seed}" if spec.seed and seed else "",
    ]
    return " · ".join(part for part in parts if part)


def _transport_words(spec: RunSpec) -> list[str]:
    return ["on", spec.named_transport] if spec.named_transport else []


def cell_title(cell: Cell) -> str:
    """The title of a cell: with its number if it is a repeat, and with its label."""
    again = f" · again ({cell.repeat + 1})" if cell.repeat else ""
    label = f" · {cell.label}" if cell.label else ""
    return title(cell.spec) + label + again + (" · speed" if cell.paired else "")
