"""The metric at the end by batch and recipe."""

from __future__ import annotations

import math

import pytest

from manyhands.analysis.generalization import Generalization, generalization
from manyhands.core.statistics import Summary
from manyhands.records.record import RunRecord
from manyhands.testing.records import record

LINEAR = {"scaling": "linear", "warmup": 5.0, "lr": 0.1}
PLAIN = {"scaling": "none", "warmup": 0.0, "lr": 0.1}


def run(batch: int, metric: float | None, recipe: dict | None = None, **fields: object) -> RunRecord:
    made = record(batch=batch, metric=metric, **fields)
    return made.model_copy(update={"recipe": recipe or LINEAR, "metric": metric})


def rows(*records: RunRecord) -> dict[tuple[str, int], Generalization]:
    return {(row.recipe, row.batch): row for row in generalization(records)}


def test_the_drop_is_against_the_same_recipe_s_smallest_batch():
    found = rows(run(4096, 0.97), run(128, 0.98), run(128, 0.97, PLAIN), run(4096, 0.90, PLAIN))
    assert found["linear + warm-up", 128].drop == 0.0
    assert found["linear + warm-up", 4096].drop == pytest.approx(0.01)
    assert found["no scaling", 4096].drop == pytest.approx(0.07)


def test_seeds_are_summarized_and_those_that_diverged_counted():
    found = rows(
        run(128, 0.97, seed=1),
        run(128, 0.98, seed=2),
        run(128, 0.96, seed=3),
        run(128, 0.1, status="diverged"),
    )
    row = found["linear + warm-up", 128]
    assert row.metric == Summary(0.97, 0.96, 0.98, 3)
    assert (row.diverged, row.of) == (1, 4)


def test_a_batch_at_which_all_diverged_has_no_metric():
    row = rows(run(128, 0.98), run(4096, 0.1, status="diverged"))["linear + warm-up", 4096]
    assert math.isnan(row.metric.median)
    assert (row.metric.n, row.diverged, row.of, row.drop) == (0, 1, 1, None)


def test_of_several_rates_the_best_counts_unless_most_of_it_diverged():
    good, high = {**LINEAR, "lr": 0.1}, {**LINEAR, "lr": 1.0}
    records = [
        run(128, 0.97, good),
        run(128, 0.99, high),
        *(run(128, 0.1, high, status="diverged", seed=n) for n in (1, 2)),
    ]
    assert rows(*records)["linear + warm-up", 128].metric.median == 0.97


def test_a_small_loss_is_better_than_a_large_one():
    records = [
        run(batch, metric).model_copy(update={"metric_name": "excess loss"})
        for batch, metric in ((128, 0.1), (512, 0.3))
    ]
    assert rows(*records)["linear + warm-up", 512].drop == pytest.approx(0.2)


@pytest.mark.parametrize("name", ["mse", "rmse", "mae", "wer"])
def test_the_best_rate_of_a_metric_that_is_to_be_small_is_the_smallest(name: str):
    """The worst was taken for the best, and a larger batch that was worse for a gain."""
    low, high = {**LINEAR, "lr": 0.1}, {**LINEAR, "lr": 1.0}
    records = [
        run(batch, metric, recipe, metric_name=name, higher_is_better=False)
        for batch, metric, recipe in ((128, 0.1, low), (128, 0.9, high), (512, 0.3, low), (512, 0.8, high))
    ]
    found = rows(*records)
    assert found["linear + warm-up", 128].metric.median == 0.1
    assert found["linear + warm-up", 512].metric.median == 0.3
    assert found["linear + warm-up", 512].drop == pytest.approx(0.2)


def test_asynchronous_and_unfinished_runs_do_not_count():
    assert (
        generalization([run(128, 0.9, strategy="hogwild", workers=2), run(128, 0.9, status="interrupted")])
        == []
    )
    assert generalization([]) == []


def test_what_was_stopped_at_its_target_says_nothing():
    """A report of steps to the target drew the accuracy at which each run happened to be stopped."""
    assert rows(run(128, 0.971, status="target"), run(4096, 0.970, status="target")) == {}
    assert set(rows(run(128, 0.98), run(4096, 0.970, status="target"))) == {("linear + warm-up", 128)}


def test_what_would_have_stopped_at_its_target_says_nothing_either():
    """Of a study of steps to the target, only the batches that missed it were drawn."""
    missed = [run(batch, 0.95, stop_at_target=True) for batch in (128, 4096)]
    lost = run(8192, 0.1, stop_at_target=True, status="diverged")
    assert rows(*missed, lost) == {}
    assert len(rows(run(128, 0.95), run(4096, 0.95))) == 2
