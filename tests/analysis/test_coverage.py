"""The 95 % intervals that reports print hold the truth about as often as they say."""

from __future__ import annotations

import pytest

from manyhands.testing.coverage import cases, coverage


@pytest.mark.parametrize("name", cases())
def test_an_interval_holds_the_truth(name: str):
    found = coverage(cases()[name], 150, seed=1)
    assert 0.88 <= found <= 0.995  # 150 simulations: give or take 2 points


def test_an_interval_that_is_too_narrow_would_be_found():
    def narrow(chance: object) -> object:
        summary, truth = cases()["speed-up, 8 paired rounds"](chance)  # type: ignore[arg-type]
        assert summary is not None
        return summary._replace(low=summary.median * 0.99, high=summary.median * 1.01), truth

    assert coverage(narrow, 150, seed=1) < 0.7  # type: ignore[arg-type]
