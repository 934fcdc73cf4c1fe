"""Thousands of damaged run folders: shown, reported, loaded and resumed, in supervised child processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

import fuzz_cases
import fuzzing

READ, RESUMED = 2_000, 200


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz_cases.quick(monkeypatch)


def test_readers(tmp_path: Path, count: int | None, drawn: random.Random, say: Callable[[str], None]) -> None:
    """No crash, no hang, no unexpected error, and no file outside the folder changed."""
    number = count or READ
    found = fuzzing.all_of(
        fuzz_cases.readers(fuzz_cases.a_study(tmp_path / "study"), drawn.random()), number, limit=60
    )
    say(f"read: {number:,} damaged folders, {len(found)} findings")
    assert not found, fuzzing.told(found)


def test_runs_go_on(
    tmp_path: Path, count: int | None, drawn: random.Random, say: Callable[[str], None]
) -> None:
    """The same for `train --resume`; half of the damage is to checkpoints, with correct checksums."""
    number = count or RESUMED
    run = fuzz_cases.a_run(tmp_path / "run")
    found = fuzzing.all_of(fuzz_cases.resuming(run, drawn.random(), deep=True), number, limit=60)
    say(f"resumed: {number:,} damaged folders, {len(found)} findings")
    assert not found, fuzzing.told(found)
