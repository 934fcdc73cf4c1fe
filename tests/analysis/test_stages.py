"""Partitions on both sides: equal stages as published, unequal ones by a schedule that is played through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.analysis import stages
from manyhands.records.record import StepTimes
from manyhands.testing.records import record

WORK = st.lists(st.integers(1, 9), min_size=2, max_size=6)


def played(work: list[int], micro_batches: int) -> float:
    """The idle share of a pipeline, stage by stage and micro-batch by micro-batch."""
    free = [0] * len(work)  # when each stage is next free
    for _ in range(micro_batches):
        arrives = 0
        for stage, seconds in enumerate(work):
            free[stage] = arrives = max(free[stage], arrives) + seconds
    return 1 - micro_batches * sum(work) / (len(work) * max(free))


@given(WORK, st.integers(1, 12))
def test_the_idle_share_is_that_of_the_schedule(work: list[int], micro_batches: int):
    assert stages.idle(work, micro_batches) == pytest.approx(played(work, micro_batches))


def test_equal_stages_are_idle_as_published():
    assert stages.idle([1, 1, 1, 1], 1) == 0.75
    assert stages.idle([1, 1, 1, 1], 13) == pytest.approx(3 / 16)
    assert stages.idle([1, 1, 1, 1]) == 0


@given(WORK)
def test_more_micro_batches_never_leave_more_idle(work: list[int]):
    shares = [stages.idle(work, count) for count in (1, 2, 4, 64)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] >= stages.idle(work) - 1e-12


def gang(**fields: object):
    return record(**({"strategy": "pipeline", "workers": 2, "batch": 256} | fields))


def times(seconds: float) -> StepTimes:
    phases = {"forward": seconds / 3, "backward": 2 * seconds / 3}
    return StepTimes(steps=100, mean=seconds, low=seconds, median=seconds, high=seconds, phases=phases)


def test_shares_are_those_measured_when_the_model_was_cut():
    chosen = {"stages": [{"first": 0, "seconds": 0.001}, {"first": 3, "seconds": 0.003}]}
    run = gang(choices=chosen, step_times=[times(0.2), times(0.2)])
    assert stages.shares(run) == [0.25, 0.75]


def test_old_records_have_the_compute_times_of_their_ranks_unless_these_shared_cores():
    run = gang(step_times=[times(0.1), times(0.3)])
    assert stages.shares(run) == pytest.approx([0.25, 0.75])
    assert (
        stages.shares(run.model_copy(update={"environment": run.environment.model_copy(update={"cores": 1})}))
        is None
    )


def test_a_damaged_partition_is_not_believed():
    for seconds in ([0.0, 0.0], [-1.0, 3.0]):
        chosen = {"stages": [{"first": at, "seconds": each} for at, each in enumerate(seconds)]}
        assert stages.shares(gang(choices=chosen)) is None
