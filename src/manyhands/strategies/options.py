"""Options as a user gives them become the options of a strategy, before torch is imported (law 10)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyhands.core import registry
from manyhands.core.errors import UsageError, shown, unknown
from manyhands.core.registry.strategy_options import (
    AverageOptions,
    LayersOptions,
    Outer,
    PipelineOptions,
    Schedule,
    ServerOptions,
    StrategyOptions,
)
from manyhands.strategies import STRATEGIES

__all__ = [
    "AverageOptions",
    "LayersOptions",
    "Outer",
    "PipelineOptions",
    "Schedule",
    "ServerOptions",
    "StrategyOptions",
    "build",
    "known",
    "model",
    "parse",
]


def model(strategy: str) -> type[StrategyOptions]:
    """The class of a strategy's options, or the sentence that says which strategies there are."""
    if strategy not in STRATEGIES:
        raise unknown("strategy", strategy, STRATEGIES)
    return STRATEGIES[strategy].options


def known(strategy: str) -> dict[str, registry.Option]:
    """The options of a strategy by name."""
    return registry.options(model(strategy))


def parse(strategy: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given, in their own types."""
    own = known(strategy)
    for name in given:
        if name not in own and (others := [other for other in STRATEGIES if name in known(other)]):
            raise UsageError(
                f"strategy {strategy} has no option {shown(name)}: it is {' and '.join(others)}'s"
            )
    return model(strategy).normalize(registry.parse(f"strategy {strategy}", model(strategy), given))


def build(strategy: str, given: Mapping[str, Any]) -> StrategyOptions:
    """All options of a strategy, or the sentence that says what is wrong with one."""
    return model(strategy)(**parse(strategy, given))
