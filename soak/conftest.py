"""Long randomized drills: `make soak COUNT=200 SEED=7`. A seed draws the same drills again."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # their helpers


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many drills, and which."""
    parser.addoption("--count", type=int, default=None, help="drills of each kind (default: each test's own)")
    parser.addoption("--seed", type=int, default=0, help="what the drills are drawn from")


@pytest.fixture(scope="session", autouse=True)
def _own_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs are signed with a key of these tests' own: nothing is written to the real home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture
def count(request: pytest.FixtureRequest) -> int | None:
    """How many drills were asked for; None: as many as the test says."""
    asked: int | None = request.config.getoption("--count")
    return asked


@pytest.fixture
def drawn(request: pytest.FixtureRequest) -> random.Random:
    """A generator for this test: the same for the same seed, another for another test."""
    return random.Random(f"{request.config.getoption('--seed')}:{request.node.name}")


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Print what a drill came to, whatever pytest captures."""

    def aloud(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}")

    return aloud
