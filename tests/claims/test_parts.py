"""The three verdicts of a part and of a claim, and the intervals that decide them."""

from __future__ import annotations

import math
import random

import pytest

from manyhands.claims.base import MOST_SEEDS, Part, settled_by, together
from manyhands.claims.intervals import Level, difference, knee, mean, ratio, slope
from manyhands.claims.seeds import edge
from manyhands.core.statistics import Estimate

RIGHT, STRADDLES, WRONG = Estimate(3.0, 2.5, 3.5), Estimate(2.1, 1.5, 2.7), Estimate(1.0, 0.5, 1.5)


def part(found: Estimate, *, above: bool = True, weak: str = "", doubt: str = "") -> Part:
    return Part("a part", found, 2.0, above, "it was found", weak, doubt, unit="x")


class TestVerdicts:
    @pytest.mark.parametrize(
        ("found", "weak", "holds"),
        [
            (RIGHT, "", True),
            (RIGHT, "one seed", True),
            (STRADDLES, "", None),
            (WRONG, "", False),
            (WRONG, "one seed", None),
        ],
        ids=str,
    )
    def test_only_an_experiment_with_power_refutes(self, found: Estimate, weak: str, holds: bool) -> None:
        assert part(found, weak=weak).holds is holds

    def test_the_direction_decides_which_side_is_right(self) -> None:
        assert part(WRONG, above=False).holds is True
        assert part(RIGHT, above=False).holds is False

    @pytest.mark.parametrize("found", [RIGHT, WRONG], ids=str)
    def test_a_doubt_leaves_both_sides_open(self, found: Estimate) -> None:
        assert part(found, doubt="the rates were not tuned").holds is None

    def test_an_unknown_value_is_on_no_side(self) -> None:
        assert part(Estimate(math.nan, -math.inf, math.inf)).holds is None
        assert part(Estimate(9.0, -math.inf, math.inf)).holds is None, "one seed has no interval"

    def test_what_is_not_settled_says_why_and_what_would_settle_it(self) -> None:
        open_ = part(STRADDLES)._replace(settles="nine seeds would")
        assert open_.sentence == (
            "it was found: not settled, because its interval, 1.5x to 2.7x, contains 2x (nine seeds would)"
        )
        assert "because one seed" in part(WRONG, weak="one seed").sentence
        assert part(RIGHT).sentence == "it was found"

    @pytest.mark.parametrize(
        ("founds", "verdict"),
        [
            ([RIGHT, RIGHT], "holds here"),
            ([RIGHT, STRADDLES], "not settled"),
            ([STRADDLES, WRONG, RIGHT], "does not hold here"),
        ],
        ids=str,
    )
    def test_one_that_does_not_hold_decides_then_one_that_is_open(
        self, founds: list[Estimate], verdict: str
    ) -> None:
        assert together([part(found) for found in founds], []).verdict == verdict


class TestWhatWouldSettle:
    def test_the_interval_shrinks_with_the_root_of_the_seeds(self) -> None:
        """0.4 of reach at a distance of 0.1 from the threshold: 16 times the seeds."""
        open_ = part(Estimate(2.1, 1.7, 2.5))
        assert settled_by(open_, seeds=1, seconds=60).settles.startswith("about 3 seeds")
        wide = part(Estimate(2.2, 1.8, 2.6))
        assert (
            settled_by(wide, seeds=3, seconds=180).settles == "about 12 seeds would settle it, 12 min of runs"
        )

    def test_equal_sides_are_never_told_apart(self) -> None:
        assert f"more than {MOST_SEEDS} seeds" in settled_by(part(Estimate(2.01, 1, 3)), 3, 60.0).settles

    def test_what_is_settled_needs_nothing(self) -> None:
        assert settled_by(part(RIGHT), 3, 60.0) == part(RIGHT)


class TestIntervals:
    def test_coverage_of_the_mean_of_three(self) -> None:
        chance = random.Random(1)
        hits = sum(
            (found := mean([chance.gauss(5, 2) for _ in range(3)])).low <= 5 <= found.high
            for _ in range(4000)
        )
        assert 0.94 <= hits / 4000 <= 0.96

    def test_one_value_has_no_interval(self) -> None:
        assert mean([4.0]) == Estimate(4.0, -math.inf, math.inf)

    def test_sides_are_compared_on_the_seeds_that_they_share(self) -> None:
        """Seeds that differ tenfold do not blur a ratio of 2 on each of them."""
        found = ratio({0: 2.0, 1: 20.0, 2: 210.0, 7: 1.0}, {0: 1.0, 1: 10.0, 2: 100.0, 8: 9.0})
        assert 2.0 < found.value < 2.1
        assert 1.8 < found.low < found.high < 2.3
        assert difference({0: 5.0, 1: 6.0}, {0: 4.0, 1: 5.0}).value == 1.0

    def test_coverage_of_the_slope(self) -> None:
        chance, hits = random.Random(2), 0
        for _ in range(2000):
            points = [(x, 0.3 * x + chance.gauss(0, 1)) for x in (0.0, 2.0, 6.0, 13.0) for _ in range(3)]
            found = slope(points)
            hits += found.low <= 0.3 <= found.high
        assert 0.93 <= hits / 2000 <= 0.97

    def test_a_line_through_two_points_has_no_interval(self) -> None:
        assert slope([(0, 1), (1, 3)]) == Estimate(2.0, -math.inf, math.inf)
        assert math.isnan(slope([(1, 1), (1, 3)]).value)


def level(x: float, value: float, reach: float = 0.01) -> Level:
    return Level(x, Estimate(value, value - reach, value + reach))


class TestKnee:
    def test_it_lies_between_what_is_surely_kept_and_surely_lost(self) -> None:
        found = knee([level(8, 0.0), level(32, 0.05), level(64, 0.15)], 0.10, 1.0)
        assert (found.low, found.high) == (32, 64)
        assert found.value == pytest.approx(32 * math.sqrt(2)), "halfway, on a logarithmic axis"

    def test_a_wide_interval_is_neither_kept_nor_lost(self) -> None:
        found = knee([level(8, 0.0), level(32, 0.05, reach=0.2), level(64, 0.5)], 0.10, 1.0)
        assert (found.low, found.high) == (8, 64)

    def test_nothing_lost_has_no_upper_end(self) -> None:
        assert knee([level(8, 0.0), level(32, 0.0)], 0.10, 1.0) == Estimate(32, 32, math.inf)

    def test_a_loss_at_once(self) -> None:
        found = knee([level(8, 0.5), level(32, 0.0)], 0.10, 1.0)
        assert (found.low, found.high) == (1.0, 8)
        assert 1.0 <= found.value <= 8


class TestEdge:
    """Whether a better learning rate is to be expected beyond those that were tried."""

    @pytest.mark.parametrize(
        ("needed", "at"),
        [
            ([3.0, 2.0, 3.0], ""),
            ([1.0, 2.0, 3.0], "smallest"),
            ([3.0, 2.0, 1.0], "largest"),
            ([1.0, 1.03, 3.0], ""),
            ([1.0, math.inf, math.inf], "smallest"),
            ([1.0], "only one"),
        ],
        ids=str,
    )
    def test_an_end_that_is_hardly_better_is_near_the_best(self, needed: list[float], at: str) -> None:
        assert edge(needed, needed.index(min(needed))) == at
