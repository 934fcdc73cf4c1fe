"""The moment at which a run reached its target, from evaluations before and after it."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.analysis.crossing import crossing, retargeted
from manyhands.records.record import Evaluation, RunRecord
from manyhands.testing.records import record as made

BATCH = 100


def learned(
    metrics: list[float | None], every: int = 10, target: float = 0.97, **fields: object
) -> RunRecord:
    """A run that is evaluated every so many steps of a second each, with these results."""
    curve = [
        Evaluation(step=every * k, samples=every * k * BATCH, seconds=float(every * k), metric=metric)
        for k, metric in enumerate(metrics, 1)
    ]
    first = next((point for point in curve if point.metric is not None and point.metric >= target), None)
    reached = {
        "target_samples": first.samples if first else None,
        "target_steps": first.step if first else None,
        "target_seconds": first.seconds if first else None,
    }
    return made(batch=BATCH, target=target, curve=curve, **{**reached, **fields})


def test_it_lies_on_the_line_between_two_evaluations() -> None:
    found = crossing(learned([0.80, 0.96, 0.98]))
    assert found is not None
    assert found[:3] == (pytest.approx(2500), pytest.approx(25), pytest.approx(25.0))
    assert (found.before, found.after) == (2000, 3000)


def test_a_loss_falls_to_its_target() -> None:
    record = learned([9.0, 9.0, 9.0], higher_is_better=False)
    curve = [point.model_copy(update={"metric": 2.0 - 0.5 * k}) for k, point in enumerate(record.curve, 1)]
    found = crossing(
        record.model_copy(update={"curve": curve, "target": 0.75, "target_samples": 3000, "target_steps": 30})
    )
    assert found is not None
    assert found.samples == pytest.approx(2500)


def test_a_run_that_did_not_get_there_has_none() -> None:
    assert crossing(learned([0.8, 0.9])) is None


def test_without_an_evaluation_before_it_is_where_it_was_seen() -> None:
    found = crossing(learned([0.99, 0.99]))
    assert found is not None
    assert (found.samples, found.before, found.after) == (1000, 0, 1000)
    assert found.spread == pytest.approx(math.log(2) / math.sqrt(12))


def test_a_result_that_was_no_number_is_nothing_to_start_from() -> None:
    found = crossing(learned([0.8, None, 0.99]))
    assert found is not None
    assert (found.samples, found.before) == (3000, 2000)


def test_an_old_record_without_a_curve_is_taken_as_it_is() -> None:
    found = crossing(made(batch=BATCH, steps_to_target=70, target_steps=None, curve=[]))
    assert found is not None
    assert found[:2] == (7000, 70)
    assert found.spread == 0.0


@given(st.floats(0.01, 0.99), st.integers(1, 50))
def test_where_learning_is_a_straight_line_the_spacing_does_not_matter(at: float, every: int) -> None:
    """Each spacing finds the same moment, not its own next evaluation."""
    slope = 0.0005  # of accuracy, per step
    target = 0.5 + slope * (100 + at * 400)
    found = crossing(learned([0.5 + slope * every * k for k in range(1, 600 // every + 2)], every, target))
    assert found is not None
    assert found.steps == pytest.approx(100 + at * 400, rel=1e-6)
    assert found.before <= found.samples <= found.after


def test_it_is_not_late_on_average() -> None:
    """Learning curves that bend and are noisy: the bias is a small part of the spacing."""
    chance = random.Random(2)
    errors = []
    for _ in range(300):
        truth = chance.uniform(300, 600)  # steps at which the expected accuracy is 0.97
        metrics = [0.97 + 0.02 * math.log(60 * k / truth) + chance.gauss(0, 0.0005) for k in range(1, 20)]
        found = crossing(learned(metrics, every=60))
        assert found is not None
        errors.append((found.steps - truth) / 60)
    assert abs(statistics.mean(errors)) < 0.1
    assert statistics.mean(abs(error) < 1 for error in errors) > 0.95


def test_a_curve_tells_when_any_other_target_was_reached() -> None:
    record = learned([0.80, 0.90, 0.96, 0.98], status="target")
    earlier, later = retargeted(record, 0.85), retargeted(record, 0.99)
    found = crossing(earlier)
    assert found is not None
    assert (found.steps, found.before, found.after) == (pytest.approx(15), 1000, 2000)
    assert (earlier.target, earlier.target_steps, earlier.target_seconds) == (0.85, 20, 20.0)
    assert crossing(later) is None
    assert (later.reached, later.status) == (False, "finished")


def test_a_loss_has_other_targets_too() -> None:
    record = learned([3.0, 2.0, 1.0], target=0.5, higher_is_better=False, target_samples=None)
    found = crossing(retargeted(record, 1.5))
    assert found is not None
    assert found.steps == pytest.approx(25)


def test_what_diverged_remains_what_diverged() -> None:
    assert retargeted(learned([0.9, 0.1], status="diverged"), 0.85).status == "diverged"
