"""What holds for every analysis of any records: it answers, and the order of the records is no part of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.analysis.answer import answers
from manyhands.analysis.asynchrony import asynchronous
from manyhands.analysis.breakdown import STEP_PHASES, breakdowns
from manyhands.analysis.fine_line import fine_lines
from manyhands.analysis.generalization import generalization
from manyhands.analysis.noise_scale import noise_scales
from manyhands.analysis.regimes import regimes
from manyhands.analysis.rows import rows
from manyhands.analysis.scaling import curves
from manyhands.analysis.target import to_target
from manyhands.analysis.verdicts import study_verdicts
from manyhands.records.record import Noise, RunRecord
from manyhands.records.study_results import Results
from manyhands.testing.records import record


def study(records: list[RunRecord]) -> Results:
    return Results(Path("results/test"), "test", "A test", records=records)


ANALYSES: dict[str, Callable[[list[RunRecord]], list[Any]]] = {
    "curves": curves,
    "to_target": to_target,
    "regimes": regimes,
    "noise_scales": noise_scales,
    "fine_lines": lambda records: fine_lines(curves(records)),
    "asynchronous": asynchronous,
    "generalization": generalization,
    "breakdowns": breakdowns,
    "rows": lambda records: rows(study(records)),
    "answers": lambda records: answers(study(records)),
}


SECONDS = st.sampled_from([0.0, 1e-6, 1e-3, 0.1, 10.0])
PHASES = st.dictionaries(st.sampled_from(STEP_PHASES), SECONDS)


@st.composite
def any_records(draw: st.DrawFn) -> list[RunRecord]:
    """A handful of runs of every kind, some of which ended badly."""
    found = []
    for number in range(draw(st.integers(1, 8))):
        strategy = draw(st.sampled_from(["single", "single", "allreduce", "server", "pipeline", "average"]))
        made = record(
            task=draw(st.sampled_from(["mnist-mlp", "mnist-cnn"])),
            strategy=strategy,
            workers=1 if strategy == "single" else draw(st.sampled_from([2, 4])),
            batch=draw(st.sampled_from([32, 128, 512])),
            threads=draw(st.sampled_from([1, 2])),
            steps_to_target=draw(st.none() | st.integers(10, 5000)),
            rate=draw(st.floats(10, 1e6)),
            phases=draw(PHASES),
            status=draw(st.sampled_from(["finished", "finished", "target", "diverged", "interrupted"])),
            timed=draw(st.booleans()),
            machine_noise=draw(st.sampled_from([None, 0.0, 0.5])),
            seed=number,
        )
        noise = Noise(small=1, big=2, gradient=draw(st.floats(-1, 5)), spread=draw(st.floats(-1, 5)), steps=9)
        lr = draw(st.sampled_from([0.1, 0.2]))
        changes = {"noise": noise, "recipe": {**made.recipe, "lr": lr}, "recipe_line": f"lr {lr}"}
        found.append(made.model_copy(update=changes))
    return found


@pytest.mark.parametrize("name", ANALYSES)
@settings(max_examples=25, deadline=None)
@given(records=any_records(), chance=st.randoms(use_true_random=False))
def test_the_order_of_records_does_not_matter(name: str, records: list[RunRecord], chance: Any):
    mixed = list(records)
    chance.shuffle(mixed)
    analyze = ANALYSES[name]
    assert sorted(map(repr, analyze(mixed))) == sorted(map(repr, analyze(records)))


@settings(max_examples=50, deadline=None)
@given(any_records())
def test_whatever_diverged_or_was_interrupted_never_reached_the_target(records: list[RunRecord]):
    arrived = sum(each.reached and each.status in ("finished", "target") for each in records)
    for each in to_target(records):  # cells that make the same steps share the runs that make them
        assert 0 <= each.reached <= min(each.of, arrived)
        assert (each.steps is not None) == (2 * each.reached > each.of)


@settings(max_examples=50, deadline=None)
@given(any_records())
def test_speed_ups_lie_in_their_intervals_and_verdicts_lose_no_more_than_the_step(records: list[RunRecord]):
    for curve in curves(records):
        for point in curve.points:
            assert (
                point.speed_up is None or point.speed_up.low <= point.speed_up.median <= point.speed_up.high
            )
    for verdict in study_verdicts(study(records)):
        assert 0 <= verdict.lost <= 1
        assert verdict.text.endswith(".")


@pytest.mark.parametrize("name", ANALYSES)
def test_nothing_gives_nothing(name: str):
    assert ANALYSES[name]([]) == []
