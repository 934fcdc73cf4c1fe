"""What a person sees of a study: rows, the live table at any size, and lines where there is no terminal."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from manyhands.records.record import StepRecord
from manyhands.records.spec import RunSpec
from manyhands.records.study_results import Cell, Results, Without
from manyhands.study import table
from manyhands.study.study_file import Study
from manyhands.study.study_state import CellState, StudyState
from manyhands.study.view import LineByLine, LiveTable
from manyhands.testing.records import record


def test_a_row_for_each_cell_with_its_baseline() -> None:
    records = [
        record(rate=10_000),
        record(rate=10_400, repeat=1),
        record(strategy="allreduce", workers=2, batch=256, rate=18_360, steps_to_target=300),
        record(strategy="server", workers=2, batch=256, rate=9_000, steps_to_target=None),
        record(strategy="hogwild", workers=2, batch=256, timed=False, steps_to_target=200),
        record(strategy="average", workers=2, batch=256, status="diverged", steps_to_target=None),
    ]
    [block] = table.blocks(records)
    found = [
        (row.strategy, row.workers, row.batch, row.rate, row.speed_up, row.to_target) for row in block.rows
    ]
    assert found == [
        ("single", "1", "128", "10,200", "1.00", "5.0 s"),
        ("allreduce", "2", "256", "18,360", "1.80", "4.2 s"),
        ("server", "2+1", "256", "9,000", "0.88", "not reached"),
        ("hogwild", "2", "256", "", "", "200 steps"),
        ("average", "2", "256", "10,000", "0.98", "diverged"),
    ]
    lines = table.draw(block)
    assert lines[0].split()[:7] == ["strategy", "workers", "batch", "img/s", "speed-up", "to", "97"]
    assert lines[-1] == " speed-up: over one worker, one thread"
    assert all(len(line) <= 40 for line in table.draw(block, 40))


def test_seeds_that_do_not_all_arrive() -> None:
    alike = [record(seed=0), record(seed=1), record(seed=2, steps_to_target=None)]
    assert table.to_target(alike) == "5.1 s (2 of 3)"


def test_noise_and_failures_are_in_the_table() -> None:
    spec = RunSpec.of(task="mnist-mlp", batch=64)
    noisy, failed = record(machine_noise=0.3), Without(Cell(spec), "it burned\nto the ground")
    drawn = table.draw_all(Results(Path("r"), "n", "t", records=[noisy], failed=[failed]))
    assert "noisy" in drawn[1]
    assert drawn[2].split("  ")[-1].strip() == "failed: it burned"


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
        "      10,000 images/s · 97 % after 5.0 s · 97.70 % at the end",
        "[51/60] mnist-mlp · single · 1 worker · batch 510 · seed 3",
        "      failed: it burned",
    ]
