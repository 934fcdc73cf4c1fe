"""Where the time of a step went."""

from __future__ import annotations

import pytest

from manyhands.analysis.breakdown import STEP_PHASES, breakdown, breakdowns, busy_threads
from manyhands.records.record import StepTimes, WorkShare
from manyhands.testing.records import record

TWO = {"strategy": "allreduce", "workers": 2, "batch": 256}


def times(**phases: float) -> StepTimes:
    mean = sum(phases.values())
    return StepTimes(steps=10, mean=mean, low=mean, median=mean, high=mean, phases=phases)


def test_phases_are_the_mean_over_the_ranks_that_train():
    found = breakdown(record(step_times=[times(forward=1.0, wait=1.0), times(forward=2.0)], **TWO))
    assert found.phases == {
        **dict.fromkeys(STEP_PHASES, 0.0),
        "forward": 1.5,
        "wait": 0.5,
    }
    assert found.step_seconds == pytest.approx(2.0)
    assert found.rank_spread == pytest.approx(1 / 3)
    assert found.title == "allreduce · 2 workers · batch 256"


def test_servers_and_lost_ranks_do_not_count():
    measured = [times(wait=9.0), times(forward=1.0), None]
    found = breakdown(record(step_times=measured, **(TWO | {"strategy": "server"})))
    assert found.step_seconds == pytest.approx(1.0)


def test_without_a_pace_the_whole_run_is_divided_by_its_steps():
    phases = [{"forward": 20.0, "evaluation": 70.0, "checkpoint": 5.0, "data": 10.0}]
    found = breakdown(
        record(step_times=[None], phases=phases[0]).model_copy(update={"phases": phases, "steps": 10})
    )
    assert found.phases["forward"] == pytest.approx(2.0)
    assert found.step_seconds == pytest.approx(3.0)
    assert "evaluation" not in found.phases


def test_traffic_is_of_one_rank_and_step():
    books = {
        "all_reduce": {"calls": 200, "bytes": 8e6, "seconds": 1},
        "barrier": {"calls": 100, "bytes": 0, "seconds": 1},
    }
    run = record(traffic=[books, books], **TWO).model_copy(update={"steps": 100})
    found = breakdown(run)
    assert (found.bytes_per_step, found.messages_per_step) == (80_000, 3)
    own = run.model_copy(update={"shares": [WorkShare(steps=50), WorkShare(steps=50)]})
    assert breakdown(own).bytes_per_step == 160_000  # at their own pace each made half of the steps


def test_memory_is_the_largest_rank_s():
    assert breakdown(record(**TWO).model_copy(update={"memory": [3, 5]})).memory == 5
    assert breakdown(record(peak_memory=7).model_copy(update={"memory": []})).memory == 7


def test_a_cell_is_shown_by_the_repeat_in_the_middle():
    runs = [record(rate=rate, run=f"run-{rate}", repeat=n) for n, rate in enumerate((9_000, 11_000, 10_000))]
    (found,) = breakdowns(runs)
    assert found.run == "run-10000"


def test_only_timed_runs_are_shown():
    assert breakdowns([record(timed=False)]) == []
    assert breakdowns([]) == []


def crew(strategy: str, *ranks: dict[str, float], **fields: object) -> float:
    run = record(strategy=strategy, batch=256, **fields)
    return busy_threads(run.model_copy(update={"phases": list(ranks)}))


def test_workers_that_wait_for_each_other_would_compute_if_they_had_a_core():
    half = {"forward": 1.0, "wait": 0.5, "communication": 0.5}
    assert crew("allreduce", *[half] * 4, workers=4) == 4
    assert crew("allreduce", *[half] * 2, workers=2, threads=3) == 6


def test_servers_and_stages_sleep_while_they_wait():
    busy, server = {"forward": 0.9, "wait": 0.1}, {"optimizer": 0.1, "wait": 0.9, "evaluation": 7.0}
    assert crew("server", server, busy, busy, workers=2) == pytest.approx(1.9)
    quarter = {"forward": 1.0, "wait": 2.5, "communication": 0.5}
    assert crew("layers", *[quarter] * 4, workers=4) == pytest.approx(1.0)


def test_busy_threads_are_those_of_the_busiest_host_without_lost_ranks():
    one = {"forward": 1.0}
    assert crew("allreduce", *[one] * 3, workers=3, hosts=["a", "b", "a"]) == 2
    assert crew("hogwild", one, {}, one, workers=3) == 2
