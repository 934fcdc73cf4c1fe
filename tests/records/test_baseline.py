"""What earlier runs say: looked up quickly however many there are, whatever state they are in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from manyhands.records.baseline import one_worker
from manyhands.records.record import OneWorker, RunRecord
from manyhands.records.run_folder import RunFolder
from manyhands.testing.records import record

SPEC = record(strategy="allreduce", workers=2).spec


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders whose result was read."""
    names: list[str] = []
    read = RunFolder.record

    def note(folder: RunFolder) -> RunRecord | None:
        names.append(folder.path.name)
        return read(folder)

    monkeypatch.setattr(RunFolder, "record", note)
    return names


def put(path: Path, text: str, at: float) -> None:
    path.mkdir(parents=True)
    (path / "result.json").write_text(text)
    os.utime(path / "result.json", (at, at))


def test_of_500_runs_the_latest_few_are_read(tmp_path: Path, opened: list[str]) -> None:
    """All of them were read and parsed before each start of several workers."""
    like, other = record(rate=500.0).model_dump_json(), record(task="digits-mlp").model_dump_json()
    for number in range(250):
        put(tmp_path / f"digits-mlp-{number}", other, 2000 + number)
        put(tmp_path / f"mnist-mlp-{number}", like, 1000 + number)
    assert one_worker(tmp_path, SPEC, threads=1) == OneWorker(500.0, 1)
    assert opened == ["mnist-mlp-249"]
    opened.clear()
    assert one_worker(tmp_path, SPEC, threads=7) == OneWorker(500.0, 1), "other threads are better than none"
    assert len(opened) == 30


def test_damaged_results_are_passed_over(tmp_path: Path) -> None:
    put(tmp_path / "mnist-mlp-1", record(rate=500.0).model_dump_json(), 1000)
    for number, text in enumerate(("", "[]", "{", "3", "[" * 100_000, '{"id": "x"}', "\x00")):
        put(tmp_path / f"mnist-mlp-bad-{number}", text, 2000 + number)
    (tmp_path / "mnist-mlp-empty").mkdir()
    (tmp_path / "mnist-mlp-file").touch()
    assert one_worker(tmp_path, SPEC, threads=1) == OneWorker(500.0, 1)


def test_a_run_that_the_user_named_is_found_too(tmp_path: Path) -> None:
    put(tmp_path / "mine", record(rate=500.0).model_dump_json(), 1000)
    put(tmp_path / "mnist-mlp-1", record(rate=900.0, workers=2, strategy="allreduce").model_dump_json(), 2000)
    assert one_worker(tmp_path, SPEC, threads=1) == OneWorker(500.0, 1)
    assert one_worker(tmp_path / "nowhere", SPEC, threads=1) is None
