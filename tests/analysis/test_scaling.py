"""Throughput, speed-up over named baselines, and curves by workers."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.analysis.scaling import Point, baselines, curves, points
from manyhands.core.statistics import Summary
from manyhands.records.record import RunRecord
from manyhands.testing.records import record

TASK = "mnist-mlp"


def gang(workers: int, rate: float, **fields: object) -> RunRecord:
    return record(strategy="allreduce", workers=workers, rate=rate, **fields)


def study() -> list[RunRecord]:
    return [
        *(record(batch=128, rate=rate, seed=n) for n, rate in enumerate((9_900, 10_000, 10_300))),
        record(batch=256, rate=11_000),
        record(batch=128, threads=2, rate=15_000),
        *(gang(2, rate, batch=256, seed=n) for n, rate in enumerate((19_000, 20_000, 20_400))),
        gang(4, 18_000, batch=256),
        gang(4, 18_500, batch=512),
    ]


def of(found: Iterable[Point], **wanted: object) -> Point:
    (one,) = [each for each in found if all(getattr(each, name) == value for name, value in wanted.items())]
    return one


def test_a_baseline_is_taken_at_the_same_batch_if_there_is_one():
    one, every = baselines(study(), TASK, 128)
    assert one is not None
    assert every is not None
    assert (one.threads, one.batch, one.name) == (1, 128, "one worker, one thread")
    assert (one.throughput.median, one.throughput.n) == (10_000, 3)
    assert one.throughput.low < 9_900 < 10_300 < one.throughput.high  # three runs do not span their noise
    assert (every.threads, every.batch, every.name) == (2, 128, "one worker, all 2 cores as threads")
    assert (one.spoken, every.spoken) == (
        "one worker with one thread",
        "one worker with all 2 cores as threads",
    )


@pytest.mark.parametrize("batch", [512, None])
def test_else_it_is_the_best_of_any_batch(batch: int | None):
    one, every = baselines(study(), TASK, batch)
    assert one is not None
    assert every is not None
    assert (one.batch, one.throughput.median) == (256, 11_000)
    assert every.batch == 128


def test_only_a_plain_worker_that_had_the_machine_is_a_baseline():
    wild = record(strategy="hogwild", workers=1)  # its recipe has no momentum
    served = record(strategy="server", workers=1)
    records = [record(timed=False), record(offload="all"), record(task="mnist-cnn"), wild, served]
    assert baselines(records, TASK, 128) == (None, None)


@pytest.mark.parametrize("strategy", ["allreduce", "average"])
def test_one_worker_is_one_worker_whatever_its_strategy_is_called(strategy: str):
    """ "All 2 cores as threads was not run", said the page beside `allreduce, 1 worker x 2 threads`."""
    ways = [(1, 1, 9_000), (1, 2, 15_000), (2, 1, 18_000)]
    records = [record(strategy=strategy, workers=w, threads=t, rate=rate) for w, t, rate in ways]
    one, every = baselines(records, TASK, 128)
    assert one is not None
    assert every is not None
    assert (one.throughput.median, every.throughput.median) == (9_000, 15_000)
    found = {(each.workers, each.threads): each for each in points(records, TASK)}
    assert found[1, 1].speed_up == Summary(1, 1, 1, 1)
    assert found[2, 1].speed_up is not None
    assert found[2, 1].speed_up.median == 2
    plain, _ = baselines([*records, record(rate=10_000)], TASK, 128)
    assert plain is not None
    assert (plain.variant, plain.throughput.median) == ("single", 10_000)


def test_a_machine_of_one_core_has_no_second_baseline():
    one, every = baselines([record(cores=1)], TASK, None)
    assert one is not None
    assert every is None


def test_a_point_says_what_its_workers_bring_and_cost():
    found = of(points(study(), TASK, price=1.8), variant="allreduce", workers=2)
    assert (found.throughput.median, found.throughput.n) == (20_000, 3)
    assert found.speed_up is not None
    assert found.speed_up.median == pytest.approx(20 / 11)  # of the baseline at the same batch
    assert found.efficiency == pytest.approx(10 / 11)
    assert found.against_threads is not None
    assert found.against_threads.median == pytest.approx(20 / 15)
    assert found.worker_seconds == pytest.approx(100.0)  # two workers for 50 s each
    assert found.money == pytest.approx(0.05)
    assert (found.ranks, found.cores, found.crowded, found.workers_text) == (2, 2, False, "2 workers")
    assert len(found.runs) == 3


def test_the_baseline_itself_has_a_speed_up_of_exactly_one():
    found = of(points(study(), TASK), variant="single", threads=1, batch=128)
    assert found.speed_up == Summary(1.0, 1.0, 1.0, 3)
    assert found.efficiency == 1.0


def test_threads_count_as_what_they_hold():
    found = of(points(study(), TASK), threads=2)
    assert found.speed_up is not None
    assert found.speed_up.median == pytest.approx(1.5)
    assert found.efficiency == pytest.approx(0.75)
    assert found.worker_seconds == pytest.approx(2e6 / 15_000)


def test_servers_are_paid_for_as_well():
    found = of(points([record(strategy="server", workers=2, rate=10_000)], TASK))
    assert (found.ranks, found.worker_seconds, found.speed_up, found.efficiency) == (3, 300.0, None, None)


def test_a_repeat_on_a_noisy_machine_marks_its_cell():
    assert not of(points([record(machine_noise=0.15)], TASK)).noisy
    assert of(points([record(machine_noise=0.16), record(machine_noise=0.0)], TASK)).noisy


def test_strong_curves_hold_the_batch_and_weak_ones_the_batch_a_worker():
    found = {
        (curve.kind, curve.fixed): [point.workers for point in curve.points] for curve in curves(study())
    }
    assert found == {("strong", 256): [1, 2, 4], ("weak", 128): [1, 2, 4]}


def test_a_weak_curve_is_measured_by_one_worker_with_its_share():
    weak = next(curve for curve in curves(study()) if curve.kind == "weak")
    assert weak.baseline is not None
    assert weak.baseline.batch == 128
    speed_ups = [point.speed_up.median for point in weak.points if point.speed_up]
    assert speed_ups == pytest.approx([1.0, 2.0, 1.85])
    assert [point.variant for point in weak.points] == ["single", "allreduce", "allreduce"]


def test_one_worker_of_the_strategy_itself_is_preferred():
    (curve,) = curves([record(batch=256), gang(1, 9_500, batch=256), gang(2, 19_000, batch=256)])
    assert [point.variant for point in curve.points] == ["allreduce", "allreduce"]


def test_one_worker_count_is_no_curve():
    assert curves([gang(2, 1.0, batch=256), gang(2, 1.0, batch=512)]) == []
    assert curves([record(), record(threads=2)]) == []


def test_nothing_gives_nothing():
    assert curves([]) == []
    assert points([], TASK) == []
    assert baselines([], TASK, 128) == (None, None)


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(10)))
def test_the_order_of_records_does_not_matter(order: list[int]):
    records = study()
    mixed = [records[n] for n in order]
    assert sorted(points(mixed, TASK), key=repr) == sorted(points(records, TASK), key=repr)
    assert sorted(curves(mixed), key=repr) == sorted(curves(records), key=repr)


@settings(max_examples=20, deadline=None)
@given(st.floats(0.1, 10))
def test_twice_the_rate_is_twice_the_speed_up(factor: float):
    plain = of(points([record(rate=10_000), gang(2, 15_000)], TASK), workers=2)
    scaled = of(points([record(rate=10_000), gang(2, factor * 15_000)], TASK), workers=2)
    assert plain.speed_up
    assert scaled.speed_up
    assert math.isclose(scaled.speed_up.median, factor * plain.speed_up.median)
    assert math.isclose(factor * scaled.worker_seconds, plain.worker_seconds)
