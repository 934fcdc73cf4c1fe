"""A short look with the eyes of `make soak`: damaged folders and study files are answered in a sentence."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

import fuzz_cases
import fuzzing
from manyhands.testing import damage

SEED, COUNT = 7, 40
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="drills are forked")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz_cases.quick(monkeypatch)


def test_readers_of_damaged_folders(tmp_path: Path) -> None:
    study = fuzz_cases.a_study(tmp_path / "study")
    found = fuzzing.all_of(fuzz_cases.readers(study, SEED), COUNT, limit=30)
    assert not found, fuzzing.told(found)


def test_runs_that_go_on_in_damaged_folders(tmp_path: Path) -> None:
    run = fuzz_cases.a_run(tmp_path / "run")
    found = fuzzing.all_of(fuzz_cases.resuming(run, SEED, deep=True), COUNT // 4, limit=30)
    assert not found, fuzzing.told(found)


def test_damaged_study_files() -> None:
    found = fuzzing.all_of(fuzz_cases.studies(SEED), COUNT, limit=30)
    assert not found, fuzzing.told(found)


def test_drills_find_what_they_look_for(tmp_path: Path) -> None:
    """A crash, a hang, an error that nobody foresaw, a file of somebody else's."""

    def drill(number: int) -> tuple[str, list[str]]:
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 2:
            time.sleep(60)
        with fuzzing.place() as here:
            outside = fuzzing.Outside(here / "outside")
            if number == 3:
                (outside.path / "file").write_text("touched")
            answer = (1, "", "error: KeyError (at x.py:1; the whole traceback is in /tmp/x)\n")
            code, out, err = answer if number == 4 else (0, "", "")
            return f"number {number}", [*fuzzing.faults(("show",), code, out, err), *outside.faults()]

    found = {each.number: each.wrong for each in fuzzing.all_of(drill, 8, limit=1.0)}
    assert sorted(found) == [1, 2, 3, 4]
    assert found[1] == "it died of signal 9"
    assert found[2] == "no answer in 1 s"
    assert found[3] == "a file outside the folder was changed"
    assert "KeyError" in found[4]


def test_a_seed_draws_the_same_damage_again(tmp_path: Path) -> None:
    texts = {damage.damaged_study(fuzz_cases.SMALL, fuzzing.generator(1, number)) for number in range(50)}
    again = {damage.damaged_study(fuzz_cases.SMALL, fuzzing.generator(1, number)) for number in range(50)}
    assert texts == again
    assert len(texts) > 40
