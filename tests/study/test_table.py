"""The table of a study: rows with their intervals, and what gives way where a terminal is narrow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from manyhands.analysis import groups
from manyhands.records.record import RunRecord
from manyhands.records.spec import RunSpec
from manyhands.records.study_results import Cell, Results, Without
from manyhands.study import table
from manyhands.study.table_layout import Row, bracketed, cut, draw, shortened
from manyhands.testing.records import record, repeated

RUNS = [
    record(rate=10_000),
    record(rate=10_400, repeat=1),
    record(strategy="allreduce", workers=2, batch=256, rate=18_360, steps_to_target=300),
    record(strategy="server", workers=2, batch=256, rate=9_000, steps_to_target=None),
    record(strategy="hogwild", workers=2, batch=256, timed=False, steps_to_target=200),
    record(strategy="average", workers=2, batch=256, status="diverged", steps_to_target=None),
    record(threads=2, rate=15_000),
]


def bare(text: str) -> str:
    return re.sub(r" \(± [^)]*\)", "", text)


def test_a_row_for_each_cell_with_its_baseline() -> None:
    [block] = table.blocks(RUNS)
    found = [
        (row.strategy, row.workers, row.batch, *map(bare, (row.rate, row.speed_up, row.to_target)))
        for row in block.rows
    ]
    assert found == [
        ("single", "1", "128", "10,200", "1.00", "5.0 s"),
        ("allreduce", "2", "256", "18,360", "1.80", "4.2 s"),
        ("server", "2+1", "256", "9,000", "0.88", "not reached"),
        ("hogwild", "2", "256", "", "", "200 steps"),
        ("average", "2", "256", "10,000", "0.98", "diverged"),
        ("single", "2 threads", "128", "15,000", "1.47", "3.4 s"),
    ]
    lines = draw(block)
    assert lines[0].split()[:7] == ["strategy", "workers", "batch", "img/s", "speed-up", "to", "97"]
    assert "threads" not in lines[0], "only one worker has several: its row says so"
    assert lines[-1] == " speed-up: over one worker, one thread · ±: 95 % interval"


def test_numbers_say_how_sure_they_are_and_repeats_make_them_surer() -> None:
    few, many = (
        table.blocks([*repeated(record(), times), *repeated(record(strategy="allreduce", workers=2), times)])
        for times in (1, 9)
    )
    wide, narrow = few[0].rows[1], many[0].rows[1]
    for name in ("rate", "speed_up", "to_target"):
        reaches = [float(re.search(r"± ([\d.]+)", getattr(row, name))[1]) for row in (wide, narrow)]  # type: ignore[index]
        assert reaches[0] > 1.5 * reaches[1] > 0, name
    assert re.fullmatch(r"10,000 \(± \d+ %\)", wide.rate)
    assert re.fullmatch(r"1\.00 \(± 0\.\d\d\)", wide.speed_up)
    assert re.fullmatch(r"\d\.\d s \(± \d\.\d\)", wide.to_target)
    assert many[0].rows[0].speed_up == "1.00", "compared with itself"


@pytest.mark.parametrize(
    ("rate", "form"),
    [
        (1e6, r"\d\d ms \(± \d+ ms\)"),
        (2_000.0, r"\d\d s \(± \d+(\.\d)?\)"),
        (100.0, r"\d+ min( \d+ s)? \(± \d+ (min( \d+ s)?|s)\)"),
    ],
)
def test_an_interval_has_the_unit_of_its_time(rate: float, form: str) -> None:
    assert re.fullmatch(form, table.to_target([record(rate=rate)], interval=True))


def test_seeds_that_do_not_all_arrive() -> None:
    alike = [record(seed=0), record(seed=1), record(seed=2, steps_to_target=None)]
    assert table.to_target(alike) == "5.1 s (2 of 3)"


def test_noise_and_failures_are_in_the_table() -> None:
    spec = RunSpec.of(task="mnist-mlp", batch=64)
    noisy, failed = record(machine_noise=0.3), Without(Cell(spec), "it burned\nto the ground")
    drawn = table.draw_all(Results(Path("r"), "n", "t", records=[noisy], failed=[failed]))
    assert "noisy" in drawn[1]
    assert drawn[2].split("  ")[-1].strip() == "failed: it burned"


def a_study() -> list[RunRecord]:
    """As the default study: options with long names, threads, recipes that differ."""
    pipelines = [
        record(strategy="pipeline", workers=2, rate=11_000, strategy_options={"micro_batches": count})
        for count in (4, 16)
    ]
    averages = [record(strategy="average", workers=2, rate=17_000, strategy_options={"every": 16})]
    crowded = [record(strategy="allreduce", workers=4, rate=12_000, cores=2)]
    another = record(batch=1024, rate=11_000)
    plain = another.model_copy(update={"recipe": {**another.recipe, "scaling": "none", "warmup": 0.0}})
    return [*RUNS, *pipelines, *averages, *crowded, another, plain]


def test_eighty_columns_keep_speed_speed_up_time_and_verdict() -> None:
    """It was: img/s `…`, and time to target and verdict cut off."""
    [block] = table.blocks(a_study())
    lines = draw(block, 80)
    assert all(len(line) <= 80 for line in lines)
    heading = lines[0]
    for name in ("strategy", "workers", "batch", "img/s", "speed-up", "to 97 %", "verdict"):
        assert name in heading
    for row, line in zip(block.rows, lines[1:], strict=False):
        assert bare(row.rate) in line
        assert bare(row.speed_up) in line
        assert (bare(row.to_target) if row.to_target != "not reached" else " no") in line
        assert row.verdict[:11] in line
    assert "at the end" not in heading
    assert lines[-1].endswith("95 % intervals: see the report"), "what is not shown is said"


@pytest.mark.parametrize("width", range(62, 160, 7))
def test_no_two_rows_look_alike_at_any_width(width: int) -> None:
    [block] = table.blocks(a_study())
    rows = draw(block, width)[1 : 1 + len(block.rows)]
    assert len({line[:60] for line in rows}) == len(rows)


def test_recipes_become_numbers_that_are_explained() -> None:
    [block] = table.blocks(a_study())
    narrow, wide = draw(block, 80), draw(block)
    assert " recipe 1: linear + warm-up, lr 0.1" in narrow
    assert " recipe 2: no scaling, lr 0.1" in narrow
    assert "no scaling, lr 0.1" in wide[len(block.rows)]
    assert not any(line.startswith(" recipe ") for line in wide)


def test_the_wider_the_terminal_the_more_is_said() -> None:
    [block] = table.blocks(a_study())
    intervals = ["\n".join(draw(block, width)).count("(±") for width in (80, 100, 120, 200)]
    assert intervals == sorted(intervals)
    assert intervals[0] < intervals[-1]


@pytest.mark.parametrize("width", [40, 20])
def test_narrower_than_all_that_the_lines_are_cut(width: int) -> None:
    [block] = table.blocks(a_study())
    assert all(len(line) <= width for line in draw(block, width))
    assert cut("abcdef", 4) == "abc…"


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["single", "average every=16"], ["single", "average eve…"]),
        (["pipeline micro=4", "pipeline micro=16"], ["pipel…icro=4", "pipel…cro=16"]),
        (
            ["pipeline cut=1 and=2 x", "pipeline cut=2 and=2 x"],
            ["pipeline cut=1 and=2 x", "pipeline cut=2 and=2 x"],
        ),
        (["average every=16", "average every=16"], ["average eve…", "average eve…"]),  # one cell, two batches
    ],
)
def test_short_names_differ_where_long_ones_do(texts: list[str], found: list[str]) -> None:
    assert shortened(texts, 12) == found


def row(strategy: str, verdict: str = "") -> Row:
    return Row(strategy, "2", "1", "128", "", "", "1", "1.00", "1 s", "", verdict)


def test_rows_that_are_not_told_apart_are_bracketed() -> None:
    same = "not told apart"
    rows = [(row("a"), same), (row("b", "slow"), same), (row("c"), same), (row("d", "x"), ""), (row("e"), "")]
    assert [each.verdict for each in bracketed(rows)] == ["┐", "├ not told apart, slow", "┘", "x", ""]
    assert [each.verdict for each in bracketed(rows[:2])] == ["┐ not told apart", "┘ slow"]
    assert [each.verdict for each in bracketed(rows[:1])] == [""], "nothing to be told apart from"


def test_rows_that_belong_together_follow_each_other() -> None:
    records = [record(), *RUNS[2:4], record(threads=2, rate=15_000)]
    winners = {("mnist-mlp", groups.key(records[index])): "not told apart" for index in (1, 3)}
    [block] = table.blocks(records, together=winners)
    assert [each.strategy + each.workers for each in block.rows] == [
        "single1",
        "allreduce2",
        "single2 threads",
        "server2+1",
    ]
    assert [each.verdict[:16] for each in block.rows[1:3]] == ["┐ not told apart", "┘"]
    drawn = table.draw_all(Results(Path("r"), "n", "t", records=records), 80, winners)
    assert "┐ not told apart" in drawn[2]
