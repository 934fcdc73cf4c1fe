"""Thousands of damaged study files: each is previewed, or refused with a sentence."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

import fuzz_cases
import fuzzing

READ = 2_000


def test_study_files(
    monkeypatch: pytest.MonkeyPatch, count: int | None, drawn: random.Random, say: Callable[[str], None]
) -> None:
    """No crash, no hang, no unexpected error."""
    fuzz_cases.quick(monkeypatch)
    number = count or READ
    found = fuzzing.all_of(fuzz_cases.studies(drawn.random()), number, limit=60)
    say(f"read: {number:,} damaged study files, {len(found)} findings")
    assert not found, fuzzing.told(found)
