"""Time to the target, with those that never arrived counted as later and not left out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.analysis.target import ToTarget, censored, to_target
from manyhands.records.record import RunRecord
from manyhands.testing.records import record, repeated


def one(*records: RunRecord, price: float | None = None) -> ToTarget:
    (found,) = to_target(records, price)
    return found


def test_a_cell_is_the_median_of_its_seeds():
    found = one(*(record(steps_to_target=n, seed=n, rate=12_800) for n in (380, 400, 450)))
    assert (found.reached, found.of) == (3, 3)
    assert found.steps is not None
    assert found.samples is not None
    assert (found.steps.median, found.steps.n) == (400, 3)
    assert found.steps.low < 380 < 450 < found.steps.high  # three seeds do not span what others would need
    assert found.samples[:3] == pytest.approx([128 * each for each in found.steps[:3]])
    assert found.seconds is not None
    assert (found.seconds.median, found.seconds.n) == (pytest.approx(4.0), 3)
    assert found.seconds.low < 3.8 < 4.5 < found.seconds.high
    assert found.step_seconds is not None
    assert found.step_seconds.median == pytest.approx(0.01)
    assert found.basis == "3 runs"


def test_one_seed_is_not_a_point_and_its_repeats_tell_nothing_new():
    found = one(record(steps_to_target=400)).steps
    assert found is not None
    assert (found.median, found.n) == (400, 1)
    assert found.low < 0.85 * 400 < 1.15 * 400 < found.high
    assert one(*repeated(record(steps_to_target=400), 3)).steps == found


def test_a_target_nobody_reached_has_no_numbers():
    found = one(record(steps_to_target=None, seed=1), record(steps_to_target=None, seed=2))
    assert (found.reached, found.of) == (0, 2)
    assert (found.steps, found.samples, found.seconds) == (None, None, None)
    assert (found.worker_seconds, found.money) == (None, None)
    assert found.step_seconds is not None


def test_two_of_three_seeds_have_a_median_at_the_later_one():
    found = one(*(record(steps_to_target=n, seed=i) for i, n in enumerate((400, None, 500))))
    assert (found.reached, found.of) == (2, 3)
    assert found.steps is not None
    assert (found.steps.median, found.steps.high) == (500, 1406)  # the third made 1,406 steps without it


def test_one_of_two_seeds_has_no_median():
    found = one(record(steps_to_target=400), record(steps_to_target=None, seed=1))
    assert (found.reached, found.of, found.steps) == (1, 2, None)


@pytest.mark.parametrize(("status", "of"), [("diverged", 2), ("interrupted", 1)])
def test_a_run_that_ended_badly_did_not_arrive_whatever_it_noted(status: str, of: int):
    found = one(record(), record(seed=1, status=status))
    assert (found.reached, found.of) == (1, of)


def test_a_short_run_for_speed_is_no_try():
    run = record(steps_to_target=None)
    short = run.model_copy(update={"spec": run.spec.replace(samples=8_000), "epochs": 0.13})
    assert to_target([short]) == []
    assert one(short, record()).of == 1


def test_steps_come_from_any_run_and_seconds_from_those_that_were_timed():
    found = one(
        record(steps_to_target=400, rate=12_800),
        record(steps_to_target=500, rate=1.0, timed=False, seed=1),
        record(steps_to_target=500, rate=1.0, timed=False, seed=2),
    )
    assert found.steps is not None
    assert found.seconds is not None
    assert found.step_seconds is not None
    assert found.steps.median == 500
    assert (found.seconds.median, found.seconds.n) == (pytest.approx(4.0), 1)
    assert found.seconds.low < 3.3 < 4.9 < found.seconds.high  # one run: the noise of the machine
    assert found.step_seconds.median == pytest.approx(0.01)


def test_nothing_timed_leaves_the_steps():
    found = one(record(timed=False))
    assert found.steps is not None
    assert (found.seconds, found.step_seconds, found.worker_seconds, found.basis) == (None, None, None, "")


def test_cost_counts_every_rank():
    found = one(record(strategy="server", workers=2, steps_to_target=400, rate=12_800), price=3.6)
    assert found.worker_seconds == pytest.approx(12.0)
    assert found.money == pytest.approx(0.012)


def test_of_several_recipes_the_best_is_told():
    def tuned(lr: float, steps: int | None) -> RunRecord:
        return record(steps_to_target=steps).model_copy(
            update={"recipe": {"lr": lr}, "recipe_line": f"lr {lr:g}"}
        )

    found = one(tuned(0.05, 700), tuned(0.1, 500), tuned(0.2, None))
    assert found.steps is not None
    assert (found.steps.median, found.recipe_line, found.recipes) == (500, "lr 0.1", 3)
    assert (found.reached, found.of) == (1, 1)


def test_different_targets_are_different_questions():
    found = to_target([record(target=0.9), record(target=0.97)])
    assert [each.target for each in found] == [0.9, 0.97]


def test_a_record_without_steps_to_the_target_has_them_from_its_samples():
    found = one(record(steps_to_target=400).model_copy(update={"target_steps": None}))
    assert found.steps is not None
    assert found.steps.median == 400


def test_nothing_gives_nothing():
    assert to_target([]) == []


@given(
    st.lists(st.floats(1, 1e6), min_size=1, max_size=12),
    st.lists(st.floats(1, 1e6), max_size=12),
    st.floats(1, 10),
)
def test_how_late_the_late_ones_are_does_not_move_the_median(
    values: list[float], bounds: list[float], later: float
):
    found, moved = censored(values, bounds), censored(values, [later * bound for bound in bounds])
    assert (found is None) == (len(values) <= len(bounds))
    if found is not None and moved is not None and len(values) > len(bounds) + 1:
        assert found.median == moved.median
        assert found.median >= sorted(values)[(len(values) - 1) // 2]


def test_a_recipe_that_was_timed_is_not_hidden_by_one_that_was_not():
    timed = record(steps_to_target=400)
    aside = record(steps_to_target=300, timed=False, recipe_line="another").model_copy(
        update={"recipe": {"name": "constant", "lr": 0.2}}
    )
    [found] = to_target([aside, timed])
    assert found.seconds is not None
    assert (found.recipes, found.steps.median) == (2, 400)
