"""What a person sees of a study: rows, the live table at any size, and lines where there is no terminal."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from manyhands.records.record import StepRecord
from manyhands.records.spec import RunSpec
from manyhands.records.study_results import Cell
from manyhands.study.study_file import Study
from manyhands.study.study_state import CellState, StudyState, title
from manyhands.study.view import LineByLine, LiveTable
from manyhands.testing.records import record


@pytest.fixture
def state() -> StudyState:
    """Sixty cells, most of them done."""
    found = StudyState(Study(Path("s.toml"), "s", "s"))
    for number in range(60):
        batch = 10 * (number + 1)
        cell = Cell(RunSpec.of(task="mnist-mlp", batch=batch, seed=3))
        state = "finished" if number < 50 else "running" if number == 50 else "left"
        done = record(batch=batch, seed=3, steps_to_target=100) if number < 50 else None
        found.entries[cell.key] = CellState(cell, state, done)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(("width", "height"), [(100, 24), (60, 12), (40, 6)])
def test_the_live_table_fits(state: StudyState, here: Path, width: int, height: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, highlight=False)
    view = LiveTable(console)
    view.begun(state, here)
    [running] = state.of("running")
    view.note(running, "64 %  loss 0.0410  1,730 img/s")
    lines = view.lines()
    view.close()
    assert len(lines) < height
    assert all(len(line) < width for line in lines)
    assert lines[0].split()[:2] == ["strategy", "workers"]
    assert lines[-2].startswith(" ▸ mnist-mlp · single · 1 worker")
    assert lines[-1].startswith(" 50 done · 1 running · 9 left · about"[: width - 2])
    assert " 500 " in lines[-3], "the last rows are shown"
    if width == 100:
        assert lines[-2].endswith("64 %  loss 0.0410  1,730 img/s")


def test_titles_say_what_is_moved_out() -> None:
    """The three cells of the study of offload had the same title."""
    titles = [title(RunSpec.of(task="blood-vgg19", batch=64, offload=mode)) for mode in ("none", "auto")]
    assert titles == [
        "blood-vgg19 · single · 1 worker · batch 64",
        "blood-vgg19 · single · 1 worker · batch 64 · offload auto",
    ]


def test_lines_say_what_began_and_what_came_of_it(
    state: StudyState, capsys: pytest.CaptureFixture[str], study: Callable[[str], Study]
) -> None:
    view = LineByLine()
    view.begun(state, Path("results/s"))
    for entry in list(state.entries.values())[49:51]:
        view.changed(entry)
    entry.state, entry.reason = "failed", "it burned"
    view.changed(entry)
    view.callback(entry).on_step(StepRecord(1, 0, 10, 0.5, 0.1, 0.1))
    assert capsys.readouterr().err.splitlines() == [
        "60 cells · results/s",
        "[50/60]  10,000 images/s · 97 % after 5.0 s · 97.70 % at the end",
        "[51/60] mnist-mlp · single · 1 worker · batch 510 · seed 3",
        "[51/60]  failed: it burned",
    ]
