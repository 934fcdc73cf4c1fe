"""Speeds measured in pairs, with real runs that take turns."""

from __future__ import annotations

import os
import time
from pathlib import Path
from random import Random

import pytest

from manyhands.callbacks.base import Callback
from manyhands.core.errors import InterruptedRunError, UsageError
from manyhands.records.record import RunRecord
from manyhands.records.spec import RunSpec
from manyhands.records.study_results import Cell, Results, StudyFolder
from manyhands.runs.defaults import fill_in
from manyhands.study import study_file
from manyhands.study.attempt import in_own_process
from manyhands.study.execute import execute
from manyhands.study.paired_cells import (
    UNTRIED,
    advantages,
    learning_cells,
    missing_baselines,
    own_learning_cells,
    speed_cell,
)
from manyhands.study.view import NoView
from manyhands.study.warm_run import EndedError, WarmRun
from manyhands.testing.paired_blocks import BASELINE, Machine, drifting, paired_study


def spec(**fields: object) -> RunSpec:
    return RunSpec.of(task="digits-mlp", **fill_in({"batch": 64, **fields}))


def warm(cell: Cell, folder: Path, check: object = None) -> WarmRun:
    made = in_own_process(cell.spec)
    return WarmRun(made, folder, folder.with_suffix(".gate"), Callback(), check or (lambda: None))  # type: ignore[arg-type]


WAYS: dict[str, dict[str, object]] = {
    "single": {"threads": 1},
    "allreduce": {"strategy": "allreduce", "workers": 2},
    "average": {"strategy": "average", "workers": 2, "strategy_options": {"every": 3}},
    "average, rank 0 is slow": {
        "strategy": "average", "workers": 2, "strategy_options": {"every": 16},
    },
    "pipeline": {"strategy": "pipeline", "workers": 2, "strategy_options": {"micro_batches": 2}},
    "sharded": {"strategy": "sharded", "workers": 2},
    "hogwild": {"strategy": "hogwild", "workers": 2},
    "server": {"strategy": "server", "workers": 2},
}  # fmt: skip


FEW = ("single", "allreduce", "average, rank 0 is slow", "server")


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [way if way in FEW else pytest.param(way, marks=pytest.mark.soak) for way in WAYS]
)
def test_a_run_in_blocks_makes_the_steps_of_a_run_in_one_piece(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pauses are no part of the run: nothing of them is in its times, and every sample is used once.

    A worker of local SGD that was ahead of rank 0 waited for it during the pauses, and counted them as
    communication.
    """
    if "slow" in way:
        monkeypatch.setenv("MANYHANDS_SLOW", "4@0")
    run = warm(speed_cell(spec(**WAYS[way])), tmp_path / "run")
    run.warm_up(0.0, 3)
    speeds = []
    for _ in range(3):
        time.sleep(0.8)  # asleep
        speeds.append(run.block(0.1, 5))
    record = run.end()
    assert record.status == "finished"
    assert all(each.steps >= 5 and each.samples_per_second > 0 for each in speeds)
    counted = sum(each.steps for each in speeds)
    assert counted < record.steps
    assert (
        record.samples == sum(share.samples for share in record.shares) or not record.spec.traits.asynchronous
    )
    awake = sum(each.seconds for each in speeds)
    # 2.4 s of sleep are not in the times of any rank; a busy machine may start one of them late
    for rank, phases in enumerate(record.phases):
        assert "paused" not in phases
        assert sum(phases.values()) < record.seconds + 1.2, rank
    assert record.training_seconds > awake * 0.5  # of a server, those of another rank
    assert all(span.phase != "paused" for spans in record.timeline for span in spans)
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]  # the gate is gone


@pytest.mark.slow
def test_a_paused_run_sleeps(tmp_path: Path) -> None:
    """Two seconds of pause cost the workers a few milliseconds of CPU each."""
    run = warm(speed_cell(spec(strategy="allreduce", workers=2)), tmp_path / "run")
    run.warm_up(0.0, 3)
    ours = [pid for pid in _children(os.getpid()) if _is_worker(pid)]
    before = _cpu_seconds(ours)
    time.sleep(2.0)
    spent = _cpu_seconds(ours) - before
    run.end()
    assert len(ours) >= 2
    assert spent < 0.5  # spinning would be about 4 seconds


def _children(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found += [child, *_children(child)]
    return found


def _is_worker(pid: int) -> bool:
    return "python" in Path(f"/proc/{pid}/cmdline").read_text()


def _cpu_seconds(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_a_run_that_diverges_says_so_instead_of_a_speed(tmp_path: Path) -> None:
    run = warm(speed_cell(spec(threads=1, recipe_options={"lr": 1e6})), tmp_path / "run")

    def measure() -> None:
        run.warm_up(0.0, 2)
        for _ in range(50):
            run.block(0.05, 5)

    with pytest.raises(EndedError, match="the loss became"):
        measure()
    assert run.end().status == "diverged"


@pytest.mark.slow
def test_a_worker_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_FAULT", "raise@1:4")
    run = warm(speed_cell(spec(strategy="allreduce", workers=2)), tmp_path / "run")
    with pytest.raises(Exception, match="worker 1 of 2"):
        run.warm_up(0.0, 30)


# ---------------------------------------------------------------------- cells
STUDY = """
block = 0.1
rounds = 3
[[grid]]
task = "digits-mlp"
strategy = ["allreduce", "hogwild"]
workers = 2
batch = 64
paired = true
target = 0.8
evaluate_every = 0.5
seed = [0, 1]
"""


def read(folder: Path, text: str = STUDY) -> study_file.Study:
    (folder / "pairs.toml").write_text(text)
    return study_file.with_baselines(study_file.read(folder / "pairs.toml"))


def test_a_paired_grid_makes_speed_and_learning_cells(tmp_path: Path) -> None:
    study = read(tmp_path)
    speed = [cell for cell in study.cells if cell.paired]
    learning = [cell for cell in study.cells if not cell.paired]
    assert [(cell.spec.strategy, cell.spec.threads) for cell in speed if cell.spec.workers == 1] == [
        ("single", 1),
        ("single", os.cpu_count()),
    ]
    assert [cell.spec.strategy for cell in speed if cell.spec.workers > 1] == ["allreduce", "hogwild"]
    assert {cell.spec.seed for cell in speed} == {0}  # seeds are for learning
    assert all(cell.spec.evaluate_every == 0 and not cell.spec.stop_at_target for cell in speed)
    # allreduce makes the steps of one worker: its trajectory is shared
    assert [(cell.spec.strategy, cell.spec.seed) for cell in learning] == [
        ("single", 0),
        ("single", 1),
        ("hogwild", 0),
        ("hogwild", 1),
    ]
    assert all(cell.spec.stop_at_target and not cell.timed for cell in learning)
    assert study.notes == ["added 2 cells with one worker to compare with (digits-mlp)"]


def test_one_worker_of_any_strategy_is_a_baseline() -> None:
    two = speed_cell(spec(strategy="allreduce", workers=2))
    one = speed_cell(spec(strategy="allreduce", workers=1, threads=1))
    every = speed_cell(spec(threads=None))
    assert missing_baselines([two, one, every]).cells == []
    assert [cell.spec.threads for cell in missing_baselines([two, one]).cells] == [os.cpu_count()]
    untimed = Cell(spec(strategy="allreduce", workers=2), timed=False)
    assert missing_baselines([untimed]).cells == []


def test_learning_is_shared_until_a_record_says_that_the_split_matters() -> None:
    specs = [spec(strategy="allreduce", workers=workers, target=0.9) for workers in (1, 2, 4)]
    shared = {cell.key for cell in learning_cells(specs)}
    assert len(shared) == 1
    plain = RunRecord.model_construct(cell=next(iter(shared)), split_matters=False)
    assert own_learning_cells(specs, [plain]) == []
    other = own_learning_cells(specs, [plain.model_copy(update={"split_matters": True})])
    assert [cell.spec.workers for cell in other] == [2, 4]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("repeats = 2", "paired cells are measured in rounds of blocks: give no repeats"),
        ("paired = 1", "paired must be true or false, got 1"),
        ("paired = [true, false]", "paired is one value for all cells of a grid, not a list"),
        ("label = 'a b'", "label must be up to 40 letters, digits, dots and underscores, got 'a b'"),
        ("label = 3", "label must be up to 40 letters"),
    ],
)
def test_what_a_paired_grid_cannot_have(tmp_path: Path, line: str, sentence: str) -> None:
    text = STUDY.replace("paired = true\n", "") if line.startswith("paired") else STUDY
    with pytest.raises(UsageError, match=sentence.replace("(", r"\(")):
        read(tmp_path, text + line + "\n")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("rounds = 2", "rounds must be at least 3, got 2"),
        ("block = 0", "block must be a time such as"),
        ("block = '1 parsec'", "block must be a time such as"),
    ],
)
def test_blocks_and_rounds_are_checked(tmp_path: Path, line: str, sentence: str) -> None:
    text = STUDY.replace("block = 0.1\nrounds = 3\n", "")
    with pytest.raises(UsageError, match=sentence):
        read(tmp_path, line + "\n" + text)


def test_a_label_makes_two_cells_of_one_spec(tmp_path: Path) -> None:
    labels = 'strategy = "allreduce"\nlabel = ["v1.0", "v1.1"]'
    text = STUDY.replace('strategy = ["allreduce", "hogwild"]', labels)
    study = read(tmp_path, text)
    speed = [cell for cell in study.cells if cell.paired and cell.spec.workers == 2]
    assert [cell.label for cell in speed] == ["v1.0", "v1.1"]
    assert speed[0].spec == speed[1].spec
    assert speed[0].key != speed[1].key
    assert [Cell.from_json(cell.to_json()) for cell in speed] == speed


# ---------------------------------------------------------------------- studies
@pytest.mark.slow
def test_a_study_in_pairs(tmp_path: Path) -> None:
    results = execute(read(tmp_path), tmp_path / "out", NoView())
    check_pairs(results, sessions={1})
    assert [record.status for record in results.records if record.paired] == ["finished"] * 4
    assert all(record.split_matters is False for record in results.records)
    assert not list((tmp_path / "out").glob("*.gate"))
    # it is finished: the same command measures nothing
    again = execute(read(tmp_path), tmp_path / "out", NoView())
    assert again.blocks == results.blocks


def check_pairs(results: Results, sessions: set[int]) -> None:
    assert {block.session for block in results.blocks} == sessions
    speed = {record.cell: record for record in results.records if record.paired}
    baseline = next(key for key, one in speed.items() if one.spec.workers == 1 and one.spec.threads == 1)
    rounds = {block.round for block in results.blocks}
    assert len(rounds) >= 3
    for number in rounds:
        mine = [block for block in results.blocks if block.round == number]
        assert [block.position for block in mine] == list(range(len(mine)))
        assert all((block.cell == baseline) == (block.position % 2 == 0) for block in mine)
    first, second = ([b.cell for b in results.blocks if b.round == n and b.position % 2] for n in (0, 1))
    assert sorted(first) == sorted(second)
    assert first != second  # the order changes


class Stopping(NoView):
    """Interrupts the study in its second round."""

    def note(self, entry: object, text: str) -> None:
        if text.startswith("round 2"):
            os.kill(os.getpid(), 2)


@pytest.mark.slow
def test_an_interrupted_measurement_continues(tmp_path: Path) -> None:
    before = len(_children(os.getpid()))
    with pytest.raises(InterruptedRunError, match="interrupted after"):
        execute(read(tmp_path), tmp_path / "out", Stopping())
    assert not list((tmp_path / "out").glob("*.gate"))
    stopped = StudyFolder(tmp_path / "out").read()
    assert {block.round for block in stopped.blocks} >= {0}
    assert not [record for record in stopped.records if record.paired]
    results = execute(read(tmp_path), tmp_path / "out", NoView())
    assert results.blocks[: len(stopped.blocks)] == stopped.blocks
    assert {block.session for block in results.blocks} == {1, 2}
    assert len([record for record in results.records if record.paired]) == 4
    assert len(_children(os.getpid())) <= before + 1  # the fork server


@pytest.mark.slow
def test_a_cell_that_fails_leaves_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the memory is too small to keep all runs alive: the reason says so."""
    left = iter([8e9, 8e9, 7e9, 6e9, 1e9])
    monkeypatch.setattr("manyhands.core.environment.available_memory", lambda: next(left))
    study = read(tmp_path, STUDY.replace("target = 0.8\n", ""))
    results = execute(study, tmp_path / "out", NoView())
    (failed,) = results.failed
    assert failed.cell.spec.strategy == "hogwild"
    assert failed.reason.startswith("1 GB of memory are free, too little to keep one more run alive")
    check_pairs(results, sessions={1})


def test_what_is_learned_faster_has_an_advantage() -> None:
    ways = [spec(strategy=name, workers=2, target=0.9) for name in ("allreduce", "hogwild", "server")]
    cells = [speed_cell(way) for way in ways]
    shared, fast, slow = learning_cells(ways)

    def arrived(cell: Cell, samples: int | None) -> RunRecord:
        fields = {
            "cell": cell.key,
            "spec": cell.spec,
            "target_samples": samples,
            "target_steps": 1,
            "curve": [],
        }
        return RunRecord.model_construct(**fields, target_seconds=1.0, split_matters=False)

    records = [arrived(shared, 1000), arrived(fast, 500), arrived(slow, None)]
    found = advantages(cells, ways, records)
    assert cells[0].key not in found  # the same steps as one worker
    fewer = found[cells[1].key]
    assert 0 < fewer.low < 0.69 < fewer.high  # log 2, and what one seed of each leaves open
    assert found[cells[2].key].high < -50
    assert advantages(cells, ways, []) == {cells[1].key: UNTRIED, cells[2].key: UNTRIED}


def test_what_was_not_tried_ends_nobody_and_may_be_ended() -> None:
    """Nobody is advised hogwild where only speed is measured, so threads must not be ended because of it."""
    ways = [spec(strategy=name, workers=2) for name in ("allreduce", "hogwild", "server")]
    same, fast, slow = cells = [speed_cell(way) for way in ways]
    untried = advantages(cells, ways, [])
    assert untried == {fast.key: UNTRIED, slow.key: UNTRIED}
    measure = drifting({BASELINE: 100, same.key: 160, fast.key: 190, slow.key: 110}, Machine(), Random(1))
    _, decision = paired_study([cell.key for cell in cells], measure, 70, untried)
    assert decision.leaders == {same.key, fast.key}
