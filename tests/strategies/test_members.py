"""Every strategy passes the conformance suite: one row each."""

from __future__ import annotations

import pytest

from manyhands import axes
from manyhands.strategies import STRATEGIES
from manyhands.testing.strategies import StrategySuite


@pytest.fixture(autouse=True, params=STRATEGIES)
def _strategy(request: pytest.FixtureRequest) -> None:
    request.instance.strategy = axes.member("strategy", STRATEGIES, request.param)


class TestStrategies(StrategySuite):
    pass
