"""Long randomized tests: `make soak COUNT=200 SEED=7`. The same seed gives the same cases."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # their helpers


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for how many cases, and which."""
    parser.addoption("--count", type=int, default=None, help="cases per test (default: each test's own)")
    parser.addoption("--seed", type=int, default=0, help="of the generator that draws the cases")


@pytest.fixture(scope="session", autouse=True)
def _own_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Sign runs with a key for these tests only: nothing is written to the real home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture
def count(request: pytest.FixtureRequest) -> int | None:
    """How many cases to run; None: the default of the test."""
    asked: int | None = request.config.getoption("--count")
    return asked


@pytest.fixture
def drawn(request: pytest.FixtureRequest) -> random.Random:
    """A generator for this test, seeded by --seed and the name of the test."""
    return random.Random(f"{request.config.getoption('--seed')}:{request.node.name}")


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Print a result, although pytest captures output."""

    def uncaptured(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}")

    return uncaptured
