"""How long a study takes: start-up and a busy machine count, and finished cells teach (constructed times)."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.core import environment
from manyhands.core.registry.launchers import LAUNCHERS, LOCAL
from manyhands.records.record import RunRecord
from manyhands.records.spec import RunSpec
from manyhands.records.study_results import Cell
from manyhands.study import estimate
from manyhands.study.paired_cells import speed_cell
from manyhands.study.remaining import Remaining
from manyhands.testing.records import record

SETTINGS: dict[str, Any] = {
    "task": "mnist-mlp",
    "batch": 128,
    "epochs": 3.0,
    "evaluate_every": 0.0,
    "threads": 1,
}
TRAINING = 18.0  # seconds: three epochs of 60,000 at 10,000 per second


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "cores", lambda: 2)


def cells(count: int, **settings: Any) -> list[Cell]:
    return [Cell(RunSpec.of(**SETTINGS | settings, seed=seed)) for seed in range(count)]


def earlier(rate: float = 10_000.0) -> list[estimate.EarlierRuns]:
    return estimate.known([record(rate=rate, evaluate_every=0.0)])


def ran(cell: Cell, seconds: float = TRAINING) -> RunRecord:
    """The record of a cell whose training took this long."""
    rate = 180_000 / seconds
    made = record(rate=rate, seed=cell.spec.seed, evaluate_every=0.0)
    return made.model_copy(update={"seconds": seconds, "training_seconds": seconds})


def test_many_short_cells_take_their_start_up() -> None:
    """It was `about 13 s to go` with 14 cells left, which took 2 minutes."""
    study = cells(14, seconds=0.5, epochs=100.0)
    found = estimate.estimate(study, earlier())
    assert found.seconds >= 14 * (0.5 + LAUNCHERS[LOCAL].start_seconds), "each has a process of its own"
    remaining = Remaining(earlier())
    remaining.plan(study)
    assert remaining.seconds(0.0) == pytest.approx(found.seconds)


def test_evaluations_count() -> None:
    with_time = [fact._replace(evaluation=0.7) for fact in earlier()]
    [without], [often] = cells(1), cells(1, evaluate_every=0.5)
    more = estimate.time_of(often.spec, with_time[0]).run - estimate.time_of(without.spec, with_time[0]).run
    assert more == pytest.approx(6 * 0.7)


@pytest.mark.parametrize(("others", "factor"), [(0.0, 1.0), (1.0, 1.0), (3.0, 2.0), (7.0, 4.0)])
def test_a_busy_machine_takes_longer(others: float, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "load", lambda: others)
    [cell] = cells(1)
    quiet = estimate.time_of(cell.spec, earlier()[0])
    assert quiet.run == pytest.approx(TRAINING)
    assert estimate.time_of(cell.spec, earlier()[0], estimate.crowding(cell.spec, others)).run == (
        pytest.approx(factor * TRAINING)
    )
    found = estimate.estimate([cell], earlier())
    assert found.busy == (others >= 1.0)
    assert found.seconds >= factor * TRAINING


def test_seconds_are_seconds_on_a_busy_machine_too(monkeypatch: pytest.MonkeyPatch) -> None:
    [cell] = cells(1, seconds=5.0)
    assert estimate.time_of(cell.spec, earlier()[0], 4.0).run == 5.0


def test_other_ways_are_less_sure() -> None:
    [cell] = cells(1, strategy="allreduce", workers=2, launcher="local", transport="shm")
    alone = TRAINING / 2  # two cores instead of one
    assert estimate.time_of(cell.spec, earlier()[0]).run == pytest.approx(estimate.UNLIKE * alone)


def test_what_starting_took_is_learned() -> None:
    """A process that starts in six seconds, because the machine is busy in a way that the load hides."""
    study = cells(11)
    remaining = Remaining(earlier())
    clock = 0.0
    for cell in study[:3]:
        remaining.begin(cell, clock)
        clock += TRAINING + 6.0
        remaining.end(cell, ran(cell), clock)
    remaining.plan(study[3:])
    assert remaining.seconds(clock) == pytest.approx(8 * (TRAINING + 6.0))


def test_a_slow_day_is_learned_from_the_first_cell() -> None:
    """The earlier runs had a quiet machine: today everything takes three times as long."""
    strategies = ["allreduce", "average"]
    others = [
        cell
        for name in strategies
        for cell in cells(2, strategy=name, workers=2, launcher="local", transport="shm")
    ]
    facts = earlier() + estimate.known(
        [record(strategy=name, workers=2, rate=18_000, evaluate_every=0.0) for name in strategies]
    )
    [first] = cells(1)
    remaining = Remaining(facts)
    remaining.plan(others)
    before = remaining.seconds(0.0)
    remaining.begin(first, 0.0)
    remaining.end(first, ran(first, 3 * TRAINING), 3 * TRAINING + 2.0)
    remaining.plan(others)
    after = remaining.seconds(3 * TRAINING + 2.0)
    assert before == pytest.approx(4 * (10.0 + LAUNCHERS[LOCAL].start_seconds + estimate.CELL))
    assert after == pytest.approx(4 * (30.0 + 2.0))


def test_runs_of_today_are_taken_as_they_are() -> None:
    """They were slow already: slowing them down once more would count the load twice."""
    study = cells(3)
    remaining = Remaining(earlier())
    remaining.begin(study[0], 0.0)
    remaining.end(study[0], ran(study[0], 3 * TRAINING), 3 * TRAINING + 2.0)
    remaining.plan(study[1:])
    assert remaining.seconds(60.0) == pytest.approx(2 * (3 * TRAINING + 2.0))


def test_a_cell_that_takes_longer_does_not_use_up_the_time_of_others() -> None:
    """It was: the estimate went to 1 s while cells were left."""
    study = cells(3)
    remaining = Remaining(earlier())
    remaining.begin(study[0], 0.0)
    remaining.plan(study[1:])
    each = TRAINING + LAUNCHERS[LOCAL].start_seconds + estimate.CELL
    assert remaining.seconds(10.0) == pytest.approx(3 * each - 10.0)
    assert remaining.seconds(500.0) == pytest.approx(2 * each + 50.0)


def test_a_failed_cell_teaches_nothing() -> None:
    study = cells(2)
    remaining = Remaining(earlier())
    remaining.begin(study[0], 0.0)
    remaining.end(study[0], None, 500.0)
    remaining.plan(study[1:])
    assert remaining.seconds(500.0) == pytest.approx(
        TRAINING + LAUNCHERS[LOCAL].start_seconds + estimate.CELL
    )


def test_no_cell_begins_after_the_budget() -> None:
    study = cells(20)
    remaining = Remaining(earlier(), budget=60.0)
    remaining.begin(study[0], 0.0)
    remaining.plan(study[1:])
    assert remaining.seconds(10.0) == pytest.approx(50.0)
    assert remaining.seconds(300.0) == pytest.approx(30.0), "only what is running"


def test_without_any_run_nothing_is_said_and_then_the_first_cell_tells() -> None:
    study = cells(3)
    remaining = Remaining([])
    remaining.plan(study)
    assert remaining.seconds(0.0) is None
    remaining.begin(study[0], 0.0)
    remaining.end(study[0], ran(study[0]), TRAINING + 4.0)
    remaining.plan(study[1:])
    assert remaining.seconds(22.0) == pytest.approx(2 * (TRAINING + 4.0))


def test_tasks_without_an_estimate_take_as_long_as_the_others() -> None:
    remaining = Remaining(earlier())
    remaining.plan([*cells(1), *cells(3, task="mnist-cnn")])
    assert remaining.seconds(0.0) == pytest.approx(
        4 * (TRAINING + LAUNCHERS[LOCAL].start_seconds + estimate.CELL)
    )


def paired(count: int) -> list[Cell]:
    return [speed_cell(cell.spec, label=str(number)) for number, cell in enumerate(cells(count))]


def test_paired_cells_take_their_rounds_and_not_their_schedule() -> None:
    """Their spec says 10,000 epochs: they end when they have been measured."""
    study = paired(3)
    pairing = estimate.Pairing(block=2.0, rounds=5)
    each = LAUNCHERS[LOCAL].start_seconds + estimate.CELL + 2.0 + 5 * 2 * 2.0
    assert estimate.estimate(study, earlier(), pairing=pairing).seconds == pytest.approx(3 * each)
    remaining = Remaining(earlier(), pairing=pairing)
    remaining.plan(study)
    assert remaining.seconds(0.0) == pytest.approx(3 * each)


def test_blocks_of_slow_steps_are_longer() -> None:
    [cell] = paired(1)
    slow = earlier(rate=64.0)[0]  # two seconds for a step of 128
    assert estimate.Pairing(1.0, 4).time_of(cell.spec, slow).run == pytest.approx(2 * 4 * 5 * 2.0)


def test_paired_cells_share_the_time_because_they_take_turns() -> None:
    """All of them are running at once: a minute is not a minute of each."""
    study = paired(4)
    remaining = Remaining(earlier(), pairing=estimate.Pairing(1.0, 10))
    for cell in study:
        remaining.begin(cell, 0.0)
    remaining.plan([])
    whole = remaining.seconds(0.0)
    assert whole is not None
    assert remaining.seconds(40.0) == pytest.approx(whole - 40.0)
    remaining.end(study[0], ran(study[0], 500.0), 40.0)  # it clearly lost
    remaining.plan([])
    assert remaining.seconds(40.0) == pytest.approx((whole - 40.0) * 3 / 4)


def test_what_a_paired_cell_slept_is_not_learned_as_start_up() -> None:
    [one], study = paired(1), cells(1)
    remaining = Remaining(earlier())
    remaining.begin(one, 0.0)
    remaining.end(one, ran(one, 1.0), 300.0)
    remaining.plan(study)
    later = remaining.seconds(300.0)
    assert later is not None
    assert later < 100.0


def test_a_run_that_never_evaluated_still_says_what_an_evaluation_takes() -> None:
    [fact] = earlier()
    assert fact.evaluation == pytest.approx(10_000 / 3 / 10_000)


@pytest.mark.parametrize(("seconds", "rounds"), [(1000.0, 20), (60.0, 10), (5.0, 3), (-50.0, 3)])
def test_a_budget_has_room_for_so_many_rounds(seconds: float, rounds: int) -> None:
    assert estimate.Pairing(1.0, 20).within(seconds, 3).rounds == rounds


def test_the_budget_ends_paired_cells_while_they_run() -> None:
    remaining = Remaining(earlier(), budget=30.0, pairing=estimate.Pairing(1.0, 20))
    for cell in paired(4):
        remaining.begin(cell, 0.0)
    remaining.plan([])
    assert remaining.seconds(10.0) == pytest.approx(20.0)
