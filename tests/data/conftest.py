"""Fixtures of the tests that read pictures."""

import itertools

import pytest

from pictures import write


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of one's own, to remember checked pictures in."""
    monkeypatch.setenv("MANYHANDS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path):
    """Two classes of three pictures: noise, so that no two crops are alike."""
    for name, number in itertools.product(("cat", "ant"), range(3)):
        write(tmp_path / f"data/train/{name}/{number}.jpg", seed=len(name) * 100 + number)
    return tmp_path / "data"
