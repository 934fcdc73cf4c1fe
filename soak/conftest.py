"""Long randomized drills: `make soak COUNT=200 SEED=7`. A seed draws the same drills again."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # their helpers


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many drills, and which."""
    parser.addoption("--count", type=int, default=None, help="drills of each kind (default: each test's own)")
    parser.addoption("--seed", type=int, default=0, help="what the drills are drawn from")


@pytest.fixture
def count(request: pytest.FixtureRequest) -> int | None:
    """How many drills were asked for; None: as many as the test says."""
    asked: int | None = request.config.getoption("--count")
    return asked


@pytest.fixture
def drawn(request: pytest.FixtureRequest) -> random.Random:
    """A generator for this test: the same for the same seed, another for another test."""
    return random.Random(f"{request.config.getoption('--seed')}:{request.node.name}")
