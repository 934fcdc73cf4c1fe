"""Every strategy passes its conformance suite: those that step together, and those at their own pace."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from manyhands.core import registry
from manyhands.strategies import STRATEGIES
from manyhands.strategies.options import build
from manyhands.testing.asynchronous import AsyncSuite
from manyhands.testing.strategies import StrategySuite


class TestStrategies(StrategySuite):
    @pytest.fixture(autouse=True, params=[name for name, row in STRATEGIES.items() if not row.asynchronous])
    def _strategy(self, request: pytest.FixtureRequest) -> None:
        self.strategy = registry.member("strategy", STRATEGIES, request.param)  # type: ignore[misc]
        self.options = build(request.param, {})


class TestHogwild(AsyncSuite):
    strategy = registry.member("strategy", STRATEGIES, "hogwild")
    name = "hogwild"


class TestServer(AsyncSuite):
    strategy = registry.member("strategy", STRATEGIES, "server")
    name = "server"


class TestBoundedServer(TestServer):
    options: ClassVar[dict[str, Any]] = {"bound": 1, "staleness_aware": True}


class TestTwoServers(TestServer):
    options: ClassVar[dict[str, Any]] = {"servers": 2}


class TestBackup(TestServer):
    options: ClassVar[dict[str, Any]] = {"backup": 1}

    def test_alone_it_is_one_worker(self) -> None:
        pytest.skip("rounds without the slowest need more than one worker")


def test_every_strategy_is_here() -> None:
    free = {name for name, row in STRATEGIES.items() if row.asynchronous}
    assert free == {suite.name for suite in (TestHogwild, TestServer)}
