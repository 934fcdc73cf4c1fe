"""Running a study: results, failures, exclusions, budget, noise, jobs, and what is left on the disk."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Answer
from manyhands.core.errors import UsageError
from manyhands.records.study_results import Results, StudyFolder
from manyhands.report import page
from manyhands.study import calibration, execute, timed_cells
from manyhands.study.journal_history import History
from manyhands.study.study_file import Study
from manyhands.study.view import NoView

Read = Callable[[str], Study]
pytestmark = pytest.mark.usefixtures("one_core")

SMALL = """
name = 'small'
[[grid]]
task = 'quadratic'
threads = 1
batch = [50, 100]
epochs = 2
seed = [0, 1]
"""


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in StudyFolder(out).events() if event["event"] == kind]


def run(study: Study, out: Path, jobs: int = 1) -> Any:
    return execute.execute(study, out, NoView(), jobs)


def test_the_table_the_answer_and_the_report(
    tmp_path: Path, typed: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []

    def draw(results: Results) -> Path:  # pictures take seconds, and have tests of their own
        drawn.append(results)
        return results.folder / "report.html"

    monkeypatch.setattr(page, "draw", draw)
    (tmp_path / "s.toml").write_text(SMALL)
    answer = typed("study", "s.toml", "-q")
    assert (answer.code, answer.err) == (0, "")
    lines = answer.out.strip().splitlines()
    assert lines[0].split()[:5] == ["strategy", "workers", "batch", "samples/s", "speed-up"]
    assert [line.split()[:3] for line in lines[1:3]] == [["single", "1", "50"], ["single", "1", "100"]]
    assert any(line.startswith("answer: ") for line in lines)
    assert lines[-1] == "report: results/small/report.html"
    assert [len(results.records) for results in drawn] == [4]


def test_only_numbers_stay_unless_models_are_kept(here: Path, study: Read) -> None:
    text = "[[grid]]\ntask = 'quadratic'\nepochs = 1\ncheckpoint_every = 0\n"
    [record] = run(study(text), here / "a").records
    kept = {path.name for path in Path(record.run).iterdir()}
    assert kept == {".lock", "spec.json", "spec.sig", "environment.json", "result.json", "steps.jsonl"}
    [record] = run(study("keep_models = true\n" + text), here / "b").records
    assert (Path(record.run) / "model.safetensors").is_file()
    assert list((Path(record.run) / "checkpoints").iterdir())


def test_finished_cells_are_not_run_again(tmp_path: Path, typed: Callable[..., Answer]) -> None:
    (tmp_path / "s.toml").write_text(SMALL)
    first = json.loads(typed("study", "s.toml", "-q", "--json", "--no-report").out)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("results/small/*/result.json")}
    assert len(stamps) == 4
    victim = next(iter(stamps))
    victim.unlink()
    again = json.loads(typed("study", "s.toml", "-q", "--json", "--no-report").out)
    assert [cell["metric"] for cell in again] == [cell["metric"] for cell in first]
    changed = [path for path, stamp in stamps.items() if path.stat().st_mtime_ns != stamp]
    assert changed == [victim]


def test_a_changed_file_keeps_what_is_finished(here: Path, study: Read) -> None:
    run(study(SMALL), here / "out")
    results = run(study(SMALL.replace("[50, 100]", "[100, 200]")), here / "out")
    assert sorted({record.spec.batch for record in results.records}) == [100, 200]
    assert Counter(event["event"] for event in StudyFolder(here / "out").events())["finished"] == 6


def test_a_cell_that_was_run_beside_others_is_run_again_when_its_seconds_count(
    here: Path, study: Read
) -> None:
    text = "[[grid]]\ntask = 'quadratic'\nepochs = 1\n"
    [untimed] = run(study(text + "timed = false"), here / "out").records
    [timed] = run(study(text), here / "out").records
    assert (untimed.timed, timed.timed) == (False, True)
    assert timed.run == untimed.run + "-again"
    [same] = run(study(text + "timed = false"), here / "out").records
    assert same.run == timed.run


def test_a_batch_that_the_data_rule_out_is_excluded(tmp_path: Path, typed: Callable[..., Answer]) -> None:
    (tmp_path / "s.toml").write_text("[[grid]]\ntask = 'digits-mlp'\nepochs = 1\nbatch = [5000, 50]\n")
    answer = typed("study", "s.toml", "--no-report")
    assert answer.code == 0
    reason = (
        "digits-mlp · single · 1 worker · batch 5,000: batch 5,000 is larger than the 1,437 training samples"
    )
    assert f"excluded: {reason}" in answer.err
    assert f"excluded: 1 cell\n  {reason}" in answer.out
    typed("study", "s.toml", "--no-report")
    assert len(events(tmp_path / "results/s", "excluded")) == 1, "the same is not said twice"


TASK = """
import manyhands as mh
from pathlib import Path
from manyhands.tasks.quadratic import quadratic

def fragile(*, number: int = 0) -> mh.Task:
    if number == 2 and Path("broken").exists():
        raise ValueError("the disk is on fire")
    return quadratic()
"""


def test_a_failed_cell_is_journalled_the_rest_goes_on_and_it_is_tried_again(
    here: Path, typed: Callable[..., Answer]
) -> None:
    (here / "mine.py").write_text(TASK)
    (here / "s.toml").write_text(
        "[[grid]]\ntask = 'mine.py:fragile'\noptions.number = [1, 2, 3]\nepochs = 1\n"
    )
    (here / "broken").touch()
    answer = typed("study", "s.toml", "--no-report")
    assert answer.code == 1
    assert "failed: ValueError: the disk is on fire" in answer.err
    assert "failed: ValueError: the disk is on fire" in answer.out
    found = StudyFolder(here / "results/s").read()
    assert [without.reason for without in found.failed] == ["ValueError: the disk is on fire"]
    assert [record.spec.options["number"] for record in found.records] == [1, 3]
    (here / "broken").unlink()
    assert typed("study", "s.toml", "--no-report").code == 0
    found = StudyFolder(here / "results/s").read()
    assert ([*found.failed], len(found.records)) == ([], 3)


def test_a_cell_that_diverges_is_a_result(tmp_path: Path, typed: Callable[..., Answer]) -> None:
    (tmp_path / "s.toml").write_text("[[grid]]\ntask = 'quadratic'\nepochs = 1\nlr = [1e30, 0.2]\n")
    answer = typed("study", "s.toml", "--no-report")
    assert answer.code == 0, answer.err
    assert "diverged" in answer.out.splitlines()[1]
    assert "the loss became inf at step 2" in answer.err
    again = typed("study", "s.toml", "--no-report")
    assert again.out == answer.out
    assert "step 2" not in again.err, "it is not run again"


def test_where_the_data_cannot_be_had_the_fallback_is_used(
    tmp_path: Path, typed: Callable[..., Answer]
) -> None:
    (tmp_path / "s.toml").write_text(
        "fallback = 'digits-mlp'\n[[grid]]\ntask = 'mnist-mlp'\nepochs = 1\nbatch = [50, 100]\n"
    )
    blocked = {
        "MANYHANDS_CACHE": str(tmp_path / "cache"),
        "PATH": "/nowhere",
        "https_proxy": "http://127.0.0.1:9",
    }
    answer = typed("study", "s.toml", "--no-report", **blocked)
    assert answer.code == 0, answer.err
    assert "using digits-mlp instead of mnist-mlp" in answer.err
    assert answer.err.count("cannot get mnist") == 1
    assert [record.spec.task for record in StudyFolder(tmp_path / "results/s").read().records] == [
        "digits-mlp"
    ] * 2


def test_when_the_budget_is_spent_the_rest_is_left(here: Path, typed: Callable[..., Answer]) -> None:
    (here / "s.toml").write_text("budget = '0.01 s'\n" + SMALL.replace("small", "s"))
    answer = typed("study", "s.toml", "--no-report")
    assert answer.code == 0
    reason = "the budget of 10 ms is spent"
    assert f"{reason}: 3 cells left; run the same command to continue" in answer.err
    found = StudyFolder(here / "results/s").read()
    assert (len(found.records), {without.reason for without in found.left}) == (1, {reason})
    assert f"left: 3 cells: {reason}" in answer.out
    for _ in range(3):
        typed("study", "s.toml", "--no-report")
    found = StudyFolder(here / "results/s").read()
    assert (len(found.records), found.left) == (4, [])


class Machine:
    """Speeds of the machine, one after the other, the last one for ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
        self._seconds = list(seconds)
        monkeypatch.setattr(calibration, "measure", self.measure)
        monkeypatch.setattr(timed_cells, "FRESH", 1e9)  # on a busy machine a second is soon over

    def measure(self) -> float:
        return self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0]


def test_a_noisy_cell_is_run_again_and_the_quietest_run_counts(
    here: Path, study: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    # twice to know it at its best; then after, and before and after each further run
    Machine(monkeypatch, 1.0, 1.0, 2.0, 1.0, 1.2)
    results = run(study("[[grid]]\ntask = 'quadratic'\nepochs = 1\n"), here / "out")
    [record], [repeated] = results.records, results.repeated
    assert (record.machine_noise, repeated.machine_noise) == (0.1, 0.5)
    assert record.run == repeated.run + "-again"
    Machine(monkeypatch, 1.0, 1.0, 2.0, 1.2, 1.2, 1.0, 1.8)
    results = run(study("[[grid]]\ntask = 'quadratic'\nepochs = 1\n"), here / "other")
    [record] = results.records
    assert record.machine_noise == 0.2
    assert [each.machine_noise for each in results.repeated] == [0.5, 0.4]
    assert record.run.endswith("-again"), "the second was the quietest"
    assert [c.seconds for c in results.calibrations] == [1.0, 1.0, 2.0, 1.2, 1.2, 1.0, 1.8]
    assert len({c.host for c in results.calibrations}) == 1


def test_what_stays_noisy_is_flagged(
    here: Path, typed: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch, 1.0, 1.0, 1.8)
    monkeypatch.setattr(execute.History, "best", property(lambda _: 1.0))
    (here / "s.toml").write_text(
        "[[grid]]\ntask = 'quadratic'\nepochs = 1\n[[grid]]\ntask = 'quadratic'\ntimed = false\n"
    )
    answer = typed("study", "s.toml", "--no-report")
    assert answer.err.count("running it again: the machine was 40 % slower than at its best") == 1
    assert answer.err.count("running it again: the machine was 80 % slower than at its best") == 1
    rows = answer.out.splitlines()
    assert "noisy" in rows[1]
    assert len(StudyFolder(here / "results/s").read().repeated) == 2
    assert len(events(here / "results/s", "finished")) == 2


def test_the_budget_limits_repeating(here: Path, study: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, 1.0, 1.0, 1.8)
    text = "budget = 0.001\n[[grid]]\ntask = 'quadratic'\nepochs = 1\n"
    results = run(study(text), here / "out")
    assert [record.machine_noise for record in results.records] == [0.4]
    assert results.repeated == []


def test_on_a_machine_that_is_always_busy_little_is_repeated(
    here: Path, study: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A study of five minutes took fifteen."""
    Machine(monkeypatch, 1.0, 1.0, 1.8)
    monkeypatch.setattr(timed_cells, "GRACE", 0.0)
    monkeypatch.setattr(timed_cells, "REPEATING", 1e-9)  # of any time that this machine takes
    results = run(study("[[grid]]\ntask = 'quadratic'\nepochs = 1\nseed = [0, 1]\n"), here / "out")
    assert len(results.records) == 2
    assert results.repeated == []


def test_the_best_is_no_lucky_moment() -> None:
    took = (5, 1, 3, 4, 6, 2, 8, 7)
    calibrations = [{"event": "calibration", "host": "here", "seconds": seconds} for seconds in took]
    assert History(calibrations, "here").best == 3
    assert History(calibrations[:2], "here").best == 1


def test_calibration_is_quick_and_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    began = time.monotonic()
    best = min(calibration.measure() for _ in range(3))
    assert 0.001 < best < 0.5
    assert time.monotonic() - began < 10


def test_untimed_cells_run_side_by_side_after_the_timed_ones(here: Path, study: Read) -> None:
    text = (
        "[defaults]\ntask = 'quadratic'\nepochs = 2\n"
        "[[grid]]\nseed = [0, 1, 2, 3, 4]\nbatch = [50, 5000000]\ntimed = false\n"
        "[[grid]]\nbatch = 100\n"
    )
    results = run(study(text), here / "one", jobs=1)
    beside = run(study(text), here / "two", jobs=3)
    assert [(r.spec.batch, r.spec.seed, r.metric) for r in beside.records] == [
        (r.spec.batch, r.spec.seed, r.metric) for r in results.records
    ]
    assert len(beside.records) == 6
    assert {without.cell.key for without in beside.excluded} == {
        without.cell.key for without in results.excluded
    }
    assert len(beside.excluded) == 5
    order = [
        event["event"] for event in StudyFolder(here / "two").events() if event["event"] != "calibration"
    ]
    assert order[:4] == ["study", "started", "finished", "started"]
    assert order[3:6] == ["started"] * 3, "three at a time"
    assert [record.spec.threads for record in beside.records] == [1, 1, 1, 1, 1, None]


def test_a_second_process_is_told(here: Path, study: Read) -> None:
    sentence = "out is in use by another process: wait for it, or choose another --out"
    with StudyFolder(here / "out").writing(), pytest.raises(UsageError, match=sentence):
        run(study(SMALL), here / "out")


def test_a_dry_run_lists_cells_reasons_and_time(here: Path, typed: Callable[..., Answer]) -> None:
    text = (
        "title = 'A title'\nabout = 'What it is about.'\n"
        + SMALL
        + (
            "[[grid]]\ntask = 'quadratic'\nstrategy = ['single', 'allreduce']\nworkers = [1, 2]\n"
            "repeats = 2\nepochs = 1\nbatch = [100, 5000000]\n"
        )
    )
    (here / "s.toml").write_text(text)
    answer = typed("study", "s.toml", "--dry-run")
    assert answer.code == 0, answer.err
    lines = answer.out.splitlines()
    assert lines[:2] == ["A title", "What it is about."]
    assert lines[2].startswith("10 cells · 10 excluded · about ")
    assert lines[2].endswith("s (quadratic measured for one second) · results/small")
    rows = [line.split("  ")[1:] for line in lines[4:7]]
    assert [[part.strip() for part in row if part.strip()][:3] for row in rows] == [
        ["quadratic · single · 1 thread · 2 epochs", "workers 1 · batch 50, 100 · seeds 0, 1", "4 cells"],
        ["quadratic · single · 1 epoch", "workers 1 · batch 100 · 2 times", "2 cells"],
        ["quadratic · allreduce · 1 epoch", "workers 1, 2 · batch 100 · 2 times", "4 cells"],
    ]
    assert "strategy single has one worker, but workers is 2" in answer.out
    assert "batch 5,000,000 is larger than the" in answer.out
    assert not (here / "results").exists()
    typed("study", "s.toml", "-q", "--no-report")
    found = json.loads(typed("study", "s.toml", "--dry-run", "--json").out)
    assert (found["cells"], len(found["finished"]), len(found["excluded"])) == ([], 10, 10)


def test_the_time_is_judged_by_earlier_runs(here: Path, typed: Callable[..., Answer]) -> None:
    (here / "s.toml").write_text(SMALL)
    typed("study", "s.toml", "-q", "--no-report")
    (here / "t.toml").write_text(
        "[[grid]]\ntask = 'quadratic'\nbatch = 50\nseed = 7\nseconds = 1000\n"
        "epochs = 10000000\nevaluate_every = 1000000\n"
    )
    found = json.loads(typed("study", "t.toml", "--dry-run", "--json").out)
    assert found["estimate"].endswith("(1 cell estimated from earlier runs)")
    assert 1000 <= found["seconds"] < 1500, "the limit counts, and so does evaluation"


ONE = "name = 'one'\n[[grid]]\ntask = 'quadratic'\nthreads = 1\nepochs = 1\n"


@pytest.mark.parametrize("method", ["begun", "changed", "callback"])
def test_a_table_that_fails_is_switched_off(
    tmp_path: Path, typed: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Law 12: it once ended the study."""

    def fail(*_: object) -> None:
        raise OSError("the terminal is gone")

    monkeypatch.setattr(f"manyhands.study.view.LineByLine.{method}", fail)
    (tmp_path / "s.toml").write_text(ONE)
    answer = typed("study", "s.toml", "--no-report")
    assert answer.code == 0, answer.err
    assert len(StudyFolder(tmp_path / "results/one").read().records) == 1
    said = "the study's table was switched off: OSError: the terminal is gone; the study continues without it"
    assert answer.err.splitlines().count(said) == 1
