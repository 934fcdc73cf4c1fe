"""Rows of the registry: every name in them exists, and every option is described."""

from __future__ import annotations

import pytest

from manyhands.core import registry
from manyhands.core.registry.launchers import LAUNCHERS
from manyhands.core.registry.strategies import STRATEGIES
from manyhands.core.registry.strategy_options import StrategyOptions
from manyhands.core.registry.transports import TRANSPORTS


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_row_names_what_exists(name: str) -> None:
    row = STRATEGIES[name]
    assert set(row.transports) <= set(TRANSPORTS)
    assert bool(row.transports) == bool(row.transport_reason)
    assert row.interval in {"", *row.options.model_fields}
    assert row.options.strategy == name or row.options is StrategyOptions
    for where in filter(None, (row.where, row.check)):
        assert callable(registry.load(where))


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_option_is_described_in_a_sentence(name: str) -> None:
    for option in registry.options(STRATEGIES[name].options).values():
        assert option.description[0].isupper()
        assert option.description.endswith(".")


def test_transports_and_launchers_name_each_other() -> None:
    for transport in TRANSPORTS.values():
        assert set(transport.launchers) <= set(LAUNCHERS)
        assert bool(transport.launchers) == bool(transport.launcher_reason)
    for launcher in LAUNCHERS.values():
        assert launcher.transport in {"", *TRANSPORTS}
