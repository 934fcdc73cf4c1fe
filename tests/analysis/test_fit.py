"""The curve S = S_min (1 + B_crit/B), recovered from points that lie on it, near it, or beyond a bound."""

from __future__ import annotations

import csv
import math
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.analysis import fit as curve_fit
from manyhands.analysis.fit import Fit, Observation, estimate, fit

PUBLISHED = Path(__file__).parents[3] / "shared/published/shallue2018_fig1_digitised.csv"
BATCHES = [8, 32, 128, 512, 2048, 8192]
S_MIN = st.floats(10, 1e5)
B_CRIT = st.floats(10, 10_000)  # where the batches can show it
FEW = settings(max_examples=40, deadline=None)


def on(curve: Fit, batches: list[int], spread: float = 0.0) -> list[Observation]:
    return [Observation(batch, curve.steps(batch), spread) for batch in batches]


@FEW
@given(S_MIN, B_CRIT, st.lists(st.sampled_from(BATCHES), min_size=3, max_size=6, unique=True))
def test_points_on_the_curve_give_it_back(s_min: float, b_crit: float, batches: list[int]):
    found = fit(on(Fit(s_min, b_crit), batches))
    assert found.s_min == pytest.approx(s_min, rel=0.01)
    assert found.b_crit == pytest.approx(b_crit, rel=0.01)


@FEW
@given(S_MIN, B_CRIT, st.floats(0.1, 0.99))
def test_bounds_that_the_curve_respects_change_nothing(s_min: float, b_crit: float, share: float):
    curve = Fit(s_min, b_crit)
    bounds = [Observation(batch, share * curve.steps(batch), censored=True) for batch in (2, 64, 20_000)]
    found = fit(on(curve, [8, 128, 2048]) + bounds)
    assert found.s_min == pytest.approx(s_min, rel=0.01)
    assert found.b_crit == pytest.approx(b_crit, rel=0.01)


def test_a_bound_above_the_curve_lifts_it():
    curve = Fit(100, 400)
    below = fit(on(curve, [32, 64, 128]))
    lifted = fit([*on(curve, [32, 64, 128], 0.1), Observation(4096, 200, 0.1, censored=True)])
    assert below.steps(4096) == pytest.approx(110, rel=0.01)
    assert 120 < lifted.steps(4096) <= 201
    assert lifted.s_min > below.s_min


@FEW
@given(S_MIN, B_CRIT, st.floats(0.05, 20), st.lists(st.floats(0.97, 1.03), min_size=6, max_size=6))
def test_the_units_of_steps_and_batch_do_not_matter(
    s_min: float, b_crit: float, unit: float, errors: list[float]
):
    exact = on(Fit(s_min, b_crit), BATCHES)
    points = [each._replace(steps=each.steps * error) for each, error in zip(exact, errors, strict=True)]
    plain = fit(points)
    longer = fit([each._replace(steps=unit * each.steps) for each in points])
    wider = fit([each._replace(batch=unit * each.batch) for each in points])
    assert longer.s_min == pytest.approx(unit * plain.s_min, rel=1e-3)
    assert longer.b_crit == pytest.approx(plain.b_crit, rel=1e-3)
    assert wider.s_min == pytest.approx(plain.s_min, rel=1e-3)
    assert wider.b_crit == pytest.approx(unit * plain.b_crit, rel=1e-3)


@FEW
@given(st.permutations(range(6)))
def test_the_order_of_points_does_not_matter(order: list[int]):
    points = [
        each._replace(steps=each.steps * (1 + 0.02 * (-1) ** n))
        for n, each in enumerate(on(Fit(50, 300), BATCHES))
    ]
    assert fit([points[n] for n in order]) == pytest.approx(fit(points), rel=1e-6)


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    truth, chance, held = Fit(150, 400), random.Random(5), 0
    for _ in range(12):
        points = [
            Observation(batch, truth.steps(batch) * chance.lognormvariate(0, 0.1), 0.1) for batch in BATCHES
        ]
        found = estimate(tuple(points))
        held += found.b_crit.low <= truth.b_crit <= found.b_crit.high
    assert held >= 10


def test_an_estimate_is_the_same_every_time_and_lies_in_its_interval():
    points = tuple(on(Fit(150, 400), [16, 64, 256], 0.1))
    first = estimate(points)
    estimate.cache_clear()
    assert estimate(points) == first
    assert first.s_min.low < first.s_min.value < first.s_min.high
    assert first.b_crit.low < first.b_crit.value < first.b_crit.high


def test_an_interval_leaves_as_much_out_on_either_side():
    """Errors of logarithms are symmetric, and so are the ends of the interval around the value."""
    found = estimate(tuple(on(Fit(150, 400), BATCHES, 0.05)))
    for each in found:
        below, above = math.log(each.value / each.low), math.log(each.high / each.value)
        assert 0.6 < below / above < 1.7


@FEW
@given(S_MIN, B_CRIT, st.floats(-1, 1), st.floats(-1, 1))
def test_the_slopes_are_those_of_the_residuals(s_min: float, b_crit: float, left: float, right: float):
    """Also for a bound, which has a slope only where the curve lies below it."""
    truth = Fit(s_min, b_crit)
    bounds = [Observation(90, truth.steps(90) * factor, 0.1, censored=True) for factor in (0.01, 100.0)]
    points = curve_fit._columns([*on(truth, BATCHES, 0.1), *bounds])
    x = np.log([s_min * b_crit, s_min]) + np.array([left, right])
    step = 1e-6
    numeric = [
        (curve_fit._residuals(x + move, points) - curve_fit._residuals(x - move, points)) / (2 * step)
        for move in step * np.eye(2)
    ]
    np.testing.assert_allclose(curve_fit._slopes(x, points), np.stack(numeric, axis=1), rtol=1e-5, atol=1e-5)


def test_the_misfit_is_the_spread_of_the_points():
    """On average over many fits of four points: the two that the curve takes for itself are counted."""
    truth, chance, spread = Fit(150, 400), np.random.default_rng(3), 0.1
    squares = []
    for _ in range(150):
        exact = on(truth, [32, 128, 512, 2048], spread)
        points = [each._replace(steps=each.steps * math.exp(spread * chance.normal())) for each in exact]
        squares.append(curve_fit._misfit(curve_fit._columns(points), fit(points)) ** 2)
    assert 0.8 < float(np.mean(squares)) / spread**2 < 1.25


def test_points_that_only_halve_leave_the_critical_batch_beyond_them():
    found = fit([Observation(batch, 64_000 / batch) for batch in (8, 16, 32, 64)])
    assert found.b_crit > 100 * 64


def test_steps_that_no_batch_changes_leave_it_below_them():
    found = fit([Observation(batch, 200) for batch in (128, 256, 512)])
    assert found.b_crit < 1.0
    assert found.s_min == pytest.approx(200, rel=0.01)


@pytest.mark.skipif(not PUBLISHED.is_file(), reason=f"{PUBLISHED} is not there")
@pytest.mark.parametrize(
    ("dataset", "model", "s_min", "b_crit"),
    [
        ("mnist", "simple_cnn_base", (140, 175), (370, 490)),
        ("imagenet", "resnet_50", (3900, 5900), (14_000, 25_000)),
    ],
)
def test_the_published_curve_is_fitted_within_its_reading_error(
    dataset: str, model: str, s_min: tuple[float, float], b_crit: tuple[float, float]
):
    with PUBLISHED.open() as file:
        lines = [
            line for line in csv.DictReader(file) if (line["dataset"], line["model"]) == (dataset, model)
        ]
    points = tuple(
        Observation(
            float(line["batch_size"]), 2 ** float(line["log2_steps"]), 0.693 * float(line["err_log2"])
        )
        for line in lines
    )
    found = estimate(points)
    assert s_min[0] < found.s_min.low < found.s_min.value < found.s_min.high < s_min[1]
    assert b_crit[0] < found.b_crit.low < found.b_crit.value < found.b_crit.high < b_crit[1]
    curve = Fit(found.s_min.value, found.b_crit.value)
    assert all(0.7 < curve.steps(point.batch) / point.steps < 1.35 for point in points)
