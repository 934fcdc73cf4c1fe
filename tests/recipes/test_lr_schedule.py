"""Schedules: Goyal's scaling and warm-up, and what holds for every schedule whatever its numbers."""

import csv
import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import MORE
from manyhands.recipes.base import Recipe
from manyhands.recipes.members import constant, lamb, large_batch, lars

PUBLISHED = Path(__file__).parents[3] / "shared/published/goyal2017_batch_vs_error.csv"
IMAGENET = 1_281_167

recipes = st.builds(
    Recipe,
    name=st.just("any"),
    optimizer=st.just("sgd"),
    lr=st.floats(1e-6, 100),
    scaling=st.sampled_from(["linear", "sqrt", "none"]),
    warmup=st.floats(0, 20),
    warmup_from=st.sampled_from(["reference", "zero"]),
    decay=st.sampled_from(["none", "step", "cosine"]),
    milestones=st.lists(st.floats(0.01, 0.99), max_size=3, unique=True).map(
        lambda given: tuple(sorted(given))
    ),
    factor=st.floats(0.01, 1),
)
batches = st.integers(1, 65_536)
epochs = st.integers(1, 2_000_000)
horizons = st.integers(1, 200_000_000)
samples = st.integers(0, 400_000_000)


@pytest.mark.skipif(not PUBLISHED.exists(), reason=f"{PUBLISHED} is not here")
def test_peak_is_the_rate_of_goyals_table():
    rows = list(csv.DictReader(PUBLISHED.read_text().splitlines()))
    assert {int(row["kn"]) for row in rows} == {2**power for power in range(7, 17)}
    for row in rows:
        assert large_batch().peak(int(row["kn"])) == pytest.approx(float(row["eta"]), rel=1e-12)


def test_scaling():
    assert large_batch().peak(1024) == 0.4
    assert large_batch(scaling="sqrt").peak(1024) == 0.2
    assert large_batch(scaling="none").peak(1024) == 0.1
    assert constant().peak(1024) == 0.1


def test_warm_up_is_gradual():
    """Goyal 2.2: from the reference rate, a constant increment an iteration, to k times it in 5 epochs."""
    batch, steps = 8192, 100
    epoch = batch * steps
    schedule = large_batch().schedule(batch, epoch, 90 * epoch)
    rates = [schedule(step * batch) for step in range(5 * steps + 1)]
    assert rates[0] == 0.1
    assert rates[-1] == pytest.approx(3.2, rel=1e-12)
    increments = [after - before for before, after in pairwise(rates)]
    assert increments == pytest.approx([(3.2 - 0.1) / (5 * steps)] * (5 * steps), rel=1e-9)


def test_goyals_steps_fall_on_epochs_30_60_80():
    schedule = large_batch().schedule(8192, IMAGENET, 90 * IMAGENET)
    for epoch, before, after in [(30, 3.2, 0.32), (60, 0.32, 0.032), (80, 0.032, 0.0032)]:
        assert schedule(epoch * IMAGENET - 1) == pytest.approx(before)
        assert schedule(epoch * IMAGENET) == pytest.approx(after)


@pytest.mark.parametrize("batch", [64, 256])
def test_nothing_to_warm_up_to(batch):
    schedule = large_batch(decay="none").schedule(batch, 1000, 10_000)
    assert {schedule(seen) for seen in range(0, 10_000, 250)} == {0.1 * batch / 256}


@pytest.mark.parametrize("recipe", [lars(), lamb()])
def test_layerwise_recipes_warm_up_from_zero(recipe):
    schedule = recipe.schedule(64, 1000, 90_000)  # also when the peak is below the reference rate
    assert schedule(0) == 0
    assert schedule(2500) == pytest.approx(recipe.peak(64) / 2)
    assert schedule(5000) == recipe.peak(64)


def test_warm_up_longer_than_the_run_is_shortened_to_it():
    schedule = large_batch(decay="cosine").schedule(512, 1000, 2000)
    assert [schedule(seen) for seen in (0, 1000, 2000, 9000)] == pytest.approx([0.1, 0.15, 0.2, 0.2])


def test_milestone_inside_the_warm_up_counts_where_it_stands():
    schedule = large_batch(milestones=(0.5,)).schedule(512, 1000, 2000)
    assert schedule(999) == pytest.approx(0.14995)
    assert schedule(1000) == pytest.approx(0.015)


def test_cosine_is_half_a_wave_after_the_warm_up():
    schedule = large_batch(decay="cosine", warmup=1).schedule(512, 1000, 5000)
    assert [schedule(seen) for seen in (1000, 2000, 3000, 4000, 5000)] == pytest.approx(
        [0.2, 0.1 * (1 + math.sqrt(0.5)), 0.1, 0.1 * (1 - math.sqrt(0.5)), 0.0]
    )


@given(recipe=recipes, batch=batches, epoch=epochs, horizon=horizons, seen=samples)
def test_rates_are_finite_and_bounded(recipe, batch, epoch, horizon, seen):
    rate = recipe.schedule(batch, epoch, horizon)(seen)
    assert math.isfinite(rate)
    assert 0 <= rate <= max(recipe.peak(batch), recipe.lr)


@given(recipe=recipes, first=batches, second=batches, epoch=epochs, horizon=horizons, seen=samples)
def test_law_2_only_samples_count(recipe, first, second, epoch, horizon, seen):
    """Where two batches deserve the same peak, no rate anywhere tells them apart."""
    unscaled = Recipe(**{**recipe.to_dict(), "scaling": "none"})
    assert unscaled.schedule(first, epoch, horizon)(seen) == unscaled.schedule(second, epoch, horizon)(seen)


@given(recipe=recipes, batch=batches, epoch=epochs, horizon=horizons, over=samples)
def test_rate_stays_after_the_horizon(recipe, batch, epoch, horizon, over):
    schedule = recipe.schedule(batch, epoch, horizon)
    assert schedule(horizon + over) == schedule(horizon)


@given(recipe=recipes, batch=batches, epoch=epochs, horizon=horizons, data=st.data())
@settings(max_examples=60 * MORE)
def test_warm_up_never_falls_and_ends_at_the_peak(recipe, batch, epoch, horizon, data):
    schedule = Recipe(**{**recipe.to_dict(), "milestones": ()}).schedule(batch, epoch, horizon)
    inside = st.integers(0, schedule.warmup)
    first, second = sorted([data.draw(inside), data.draw(inside)])
    assert schedule(first) <= schedule(second)
    assert schedule(schedule.warmup) == recipe.peak(batch)
    if schedule.warmup:  # continuous: the last sample's rate is one increment below the peak
        increment = (schedule.peak - schedule.start) / schedule.warmup
        gap = schedule.peak - schedule(schedule.warmup - 1)
        assert gap == pytest.approx(increment, rel=1e-6, abs=1e-12 * schedule.peak)


@given(recipe=recipes, batch=batches, epoch=epochs, horizon=horizons, data=st.data())
def test_cosine_falls_to_zero(recipe, batch, epoch, horizon, data):
    schedule = Recipe(**{**recipe.to_dict(), "decay": "cosine"}).schedule(batch, epoch, horizon)
    if schedule.warmup < horizon:
        after = st.integers(schedule.warmup, horizon)
        first, second = sorted([data.draw(after), data.draw(after)])
        assert schedule(first) >= schedule(second)
        assert schedule(horizon) == 0


@given(batch=batches, epoch=epochs, horizon=horizons, seen=samples, lr=st.floats(1e-6, 10))
def test_constant_is_constant(batch, epoch, horizon, seen, lr):
    assert constant(lr=lr).schedule(batch, epoch, horizon)(seen) == lr
