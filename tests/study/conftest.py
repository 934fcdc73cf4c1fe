"""A quiet machine, but where a test makes it busy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from manyhands.study import calibration, estimate, study_file
from manyhands.study.study_file import Study

QUIET = 0.03


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests share the cores with others: by the clock nothing would be quiet."""
    monkeypatch.setattr(calibration, "measure", lambda: QUIET)
    monkeypatch.setattr(estimate, "load", lambda: 0.0)


@pytest.fixture
def study(tmp_path: Path) -> Callable[[str], Study]:
    """Write a study file and read it."""

    def write(text: str) -> Study:
        (tmp_path / "s.toml").write_text(text)
        return study_file.read(tmp_path / "s.toml")

    return write
