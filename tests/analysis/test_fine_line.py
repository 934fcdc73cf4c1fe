"""Where more workers stop to pay: constructed curves on both sides of the line."""

from __future__ import annotations

import pytest

from manyhands.analysis.fine_line import FineLine, fine_lines
from manyhands.analysis.scaling import curves
from manyhands.records.record import RunRecord
from manyhands.testing.records import record

SURE = 9  # runs of a cell, where one rate is given: its interval is 5 % wide


def gang(workers: int, *rates: float, **fields: object) -> list[RunRecord]:
    rates = rates * SURE if len(rates) == 1 else rates
    strategy = "single" if workers == 1 else "allreduce"
    options = {"batch": 256, "cores": 64} | fields
    return [
        record(strategy=strategy, workers=workers, rate=rate, seed=n, **options)
        for n, rate in enumerate(rates)
    ]


def line(*gangs: list[RunRecord]) -> FineLine:
    found = fine_lines(
        [curve for curve in curves([run for found in gangs for run in found]) if curve.kind == "strong"]
    )
    assert len(found) == 1
    return found[0]


def test_the_line_is_where_throughput_falls():
    found = line(gang(1, 10_000), gang(2, 19_000), gang(4, 36_000), gang(8, 34_200))
    assert (found.counts, found.best) == ([1, 2, 4, 8], 4)
    assert (found.slower_from, found.costlier_from) == (8, 8)
    assert found.sentence == "More workers do not pay: 8 are 5 % slower than 4."


def test_a_fall_within_the_intervals_is_none():
    assert (
        line(gang(1, 10_000), gang(2, 19_000, 20_000, 21_000), gang(4, 18_500, 19_000, 19_500)).slower_from
        is None
    )
    assert (
        line(gang(1, 10_000), gang(2, 19_600, 20_000, 21_000), gang(4, 16_000, 16_500, 17_000)).slower_from
        == 4
    )


@pytest.mark.parametrize(("rate", "slower_from"), [(15_000, None), (14_500, 4)])
def test_of_single_runs_a_fall_of_a_quarter_counts(rate: float, slower_from: int | None):
    """One run of each says no more: the same cell run again may differ by as much."""
    single = [each[:1] for each in (gang(1, 10_000), gang(2, 20_000), gang(4, rate))]
    assert line(*single).slower_from == slower_from


def test_from_the_line_on_all_are_slower():
    dip = line(gang(1, 10_000), gang(2, 9_000), gang(4, 18_000), gang(8, 17_000), gang(16, 16_000))
    assert dip.slower_from == 8
    worse = line(gang(1, 10_000), gang(2, 9_000), gang(4, 8_000))
    assert (worse.slower_from, worse.best) == (2, 1)
    assert worse.sentence == "More workers do not pay: 2 are 10 % slower than 1."


@pytest.mark.parametrize(
    ("rate", "costlier_from", "unclear_from"),
    [(32_500, None, None), (31_000, None, 4), (29_000, None, 4), (27_500, 4, None)],
)
def test_a_further_worker_must_bring_half_of_one(
    rate: float, costlier_from: int | None, unclear_from: int | None
):
    """30,000 are half of one more for each; around it, intervals of 5 % do not say on which side it is."""
    found = line(gang(1, 10_000), gang(2, 20_000), gang(4, rate))
    assert (found.slower_from, found.costlier_from, found.unclear_from) == (None, costlier_from, unclear_from)


def test_what_is_not_told_apart_is_said_so():
    near = line(gang(1, 10_000)[:1], gang(2, 12_000)[:1])
    assert near.sentence == "2 workers are not told apart from 1: 1.20x (0.88x to 1.64x) as fast."
    far = line(gang(1, 10_000), gang(2, 20_000), gang(4, 30_000))
    assert far.sentence == (
        "Whether 4 workers are worth their cost is not clear: they are 1.50x (1.43x to 1.57x) as fast as 2."
    )


def test_a_noisy_machine_draws_no_line():
    noisy = gang(4, 9_000, machine_noise=0.5)
    found = line(gang(1, 10_000), gang(2, 19_000), noisy[:2])
    assert (found.slower_from, found.costlier_from) == (None, None)
    assert found.sentence == (
        "Whether 4 workers are faster than 2 is not clear: the machine was noisy while they were measured."
    )
    assert line(gang(1, 10_000), gang(2, 19_000), noisy).slower_from == 4, "of nine runs the interval counts"


def test_the_cost_line_is_said_where_nothing_falls():
    assert line(gang(1, 10_000), gang(2, 19_000), gang(4, 22_000)).sentence == (
        "From 4 workers on a further one brings less than half of what one does alone."
    )
    assert line(gang(1, 10_000), gang(2, 19_000), gang(4, 37_000)).sentence == (
        "Up to 4 workers, the most that were run, each further one pays."
    )


def test_too_few_cores_are_said_to_be_the_reason():
    found = line(gang(1, 10_000, cores=2), gang(2, 19_000, cores=2), gang(4, 18_050, cores=2))
    assert found.crowded_from == 4
    assert (
        found.sentence == "More workers do not pay: 4 are 5 % slower than 2, where 4 workers share 2 cores."
    )


def test_cores_are_no_reason_for_a_line_crossed_before_they_ran_out():
    found = line(gang(1, 10_000, cores=2), gang(2, 9_000, cores=2), gang(4, 8_000, cores=2))
    assert found.sentence == "More workers do not pay: 2 are 10 % slower than 1."


def test_threads_and_servers_are_counted_where_cores_are_the_reason():
    two = gang(1, 10_000, cores=4, threads=2) + gang(2, 18_000, cores=4, threads=2)
    found = line(two, gang(4, 17_000, cores=4, threads=2))
    assert found.sentence.endswith(", where 4 workers with 2 threads each share 4 cores.")
    server = record(strategy="server", workers=2, rate=9_000, batch=256, cores=2)
    assert line(gang(1, 10_000, cores=2), [server]).sentence.endswith(", where 3 processes share 2 cores.")


def test_without_one_worker_the_smallest_gang_s_share_stands_for_it():
    found = line(gang(2, 20_000), gang(4, 31_000), gang(8, 45_000))
    assert found.costlier_from == 8


def test_a_weak_curve_says_what_it_holds():
    records = [*gang(1, 10_000, batch=128), *gang(2, 19_000, batch=256), *gang(4, 18_000, batch=512)]
    (found,) = fine_lines(curves(records))
    assert (found.kind, found.fixed, found.batch, found.slower_from) == ("weak", 128, "128 per worker", 4)


def test_nothing_gives_nothing():
    assert fine_lines([]) == []
