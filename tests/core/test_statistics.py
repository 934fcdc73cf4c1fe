"""Medians with intervals, and ratios of them."""

from __future__ import annotations

import math
import random

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core.statistics import Summary, apart, coverage, measured, ratio, student_t, summary

VALUES = st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=40)


def test_one_value_has_an_interval_of_no_width():
    assert summary([7.0]) == Summary(7.0, 7.0, 7.0, 1)


def test_up_to_five_values_the_interval_is_their_range():
    assert summary([3.0, 1.0]) == Summary(2.0, 1.0, 3.0, 2)
    assert summary([5.0, 1.0, 2.0, 4.0, 3.0]) == Summary(3.0, 1.0, 5.0, 5)


def test_of_nine_values_the_outermost_at_either_end_is_left_out():
    assert summary([float(n) for n in range(1, 10)]) == Summary(5.0, 2.0, 8.0, 9)


def test_a_summary_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one value"):
        summary([])


@pytest.mark.parametrize(("n", "share"), [(1, 0.0), (2, 0.5), (3, 0.75), (5, 0.9375), (6, 0.96875)])
def test_coverage_is_the_binomial_s(n: int, share: float):
    assert coverage(n) == share


@given(st.integers(6, 200))
def test_from_six_values_on_the_interval_holds_the_median_in_95_of_100(n: int):
    assert 0.95 <= coverage(n) < 1


def test_the_interval_covers_the_true_median_as_often_as_it_says():
    draw = random.Random(3)
    held = 0
    for _ in range(2000):
        found = summary([draw.lognormvariate(0, 1) for _ in range(8)])
        held += found.low <= 1.0 <= found.high
    assert abs(held / 2000 - coverage(8)) < 0.02


@given(VALUES)
def test_the_interval_holds_the_median_and_the_range_holds_the_interval(values: list[float]):
    found = summary(values)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)


@given(VALUES, st.randoms())
def test_the_order_does_not_matter(values: list[float], chance: random.Random):
    mixed = list(values)
    chance.shuffle(mixed)
    assert summary(mixed) == summary(values)


@given(VALUES, VALUES)
def test_a_ratio_s_interval_holds_it_and_is_wider_than_each_part_s(over: list[float], under: list[float]):
    a, b = summary(over), summary(under)
    found = ratio(a, b)
    assert 0 < found.low <= found.median <= found.high
    assert found.n == min(a.n, b.n)
    slack = 1 + 1e-9
    assert found.high / found.median * slack >= max(a.high / a.median, b.median / b.low)
    assert found.high / found.median <= slack * (a.high / a.median) * (b.median / b.low)


@given(VALUES, VALUES, st.floats(0.01, 100))
def test_scaling_what_is_divided_scales_the_ratio(over: list[float], under: list[float], factor: float):
    plain = ratio(summary(over), summary(under))
    scaled = ratio(summary([factor * value for value in over]), summary(under))
    for one, other in zip(plain[:3], scaled[:3], strict=True):
        assert math.isclose(factor * one, other, rel_tol=1e-9)


def test_intervals_that_touch_are_not_apart():
    assert not apart(Summary(1.0, 0.5, 2.0, 3), Summary(3.0, 2.0, 4.0, 3))
    assert apart(Summary(1.0, 0.5, 1.9, 3), Summary(3.0, 2.0, 4.0, 3))


@pytest.mark.parametrize("level", [0.05, 0.004, 0.3])
@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 8, 31, 100])
def test_students_t_without_scipy(freedom: int, level: float) -> None:
    assert student_t(freedom, level) == pytest.approx(scipy.stats.t.ppf(1 - level / 2, freedom), rel=1e-6)


@pytest.mark.parametrize("n", [2, 3, 6])
def test_values_that_are_far_noisier_than_usual_are_believed(n: int) -> None:
    chance, held = random.Random(n), 0
    for _ in range(1000):
        found = measured([1000 * math.exp(chance.gauss(0, 1.0)) for _ in range(n)])  # usual is 0.08
        held += found.low <= 1000 <= found.high
    assert held / 1000 >= 0.80  # of 95: two values may be near to each other by chance
    calm = measured([1000.0] * n)
    assert calm.high > 1005  # and a few equal values are not believed to be without noise


@pytest.mark.parametrize("noise", [0.03, 0.08, 0.12])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 20])
def test_the_interval_of_measurements_holds_the_truth(n: int, noise: float) -> None:
    """Simulated on quiet, ordinary and busy machines: about 95 of 100, one measurement included."""
    chance = random.Random(n)
    held = 0
    for _ in range(2000):
        found = measured([1000 * math.exp(chance.gauss(0, noise)) for _ in range(n)])
        held += found.low <= 1000 <= found.high
    assert held / 2000 >= 0.90
    if noise == 0.08 and n >= 3:  # with fewer it is wider: how noisy this machine is cannot be seen yet
        assert 0.93 <= held / 2000 <= 0.98


def test_one_measurement_is_not_a_point() -> None:
    found = measured([1000.0])
    assert (found.median, found.n) == (1000.0, 1)
    assert found.low == pytest.approx(1000 / 1.2486, rel=1e-3)
    assert found.high == pytest.approx(1000 * 1.2486, rel=1e-3)
    assert measured([1000.0], noise=0.1).high > found.high


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=8), st.floats(1e-3, 1e3))
def test_units_do_not_matter_to_an_interval(values: list[float], unit: float) -> None:
    plain, scaled = measured(values), measured([unit * value for value in values])
    assert scaled[:3] == pytest.approx([unit * end for end in plain[:3]], rel=1e-6)


@pytest.mark.parametrize("n", [1, 3, 9])
def test_two_equal_cells_are_rarely_told_apart(n: int) -> None:
    """A/A: the interval of their ratio excludes equality in at most 9 of 100 studies."""
    chance = random.Random(10 + n)

    def cell() -> Summary:
        return measured([1000 * math.exp(chance.gauss(0, 0.08)) for _ in range(n)])

    ratios = [ratio(cell(), cell()) for _ in range(2000)]
    assert sum(each.low > 1 or each.high < 1 for each in ratios) / 2000 <= 0.09
