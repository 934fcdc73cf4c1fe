"""Law 6 at random: which process is killed, when and how often; every run must end with the same bits."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from children import Child
from faults.test_kill_and_resume import TASK
from manyhands.engine.checkpoint.storage import Checkpoints
from manyhands.records.record import StepRecord
from manyhands.records.run_folder import RunFolder
from manyhands.testing.launchers import left_over

RUNS = 60  # that are really killed
COMMON = ["--batch", "48", "--epochs", "4", "--threads", "1", "--quiet"]
AVERAGE = ["--workers", "2", "--strategy", "average", "--every", "3"]
WAYS = {
    "single": [],
    "single, a process of its own": ["--launcher", "local"],
    "allreduce, 2": ["--workers", "2"],
    "allreduce, 3": ["--workers", "3"],
    "allreduce, 2, torch": ["--workers", "2", "--transport", "torch"],
    "allreduce, 2, adamw": ["--workers", "2", "--set", "recipe.optimizer=adamw"],
    "average, 2": AVERAGE,
    "average, 2, torch": [*AVERAGE, "--transport", "torch"],
    "average, 2, nesterov": [*AVERAGE, "--outer", "nesterov"],
    "pipeline, 2": ["--workers", "2", "--strategy", "pipeline", "--micro-batches", "4"],
    "sharded, 2": ["--workers", "2", "--strategy", "sharded"],
}
VICTIMS = ("parent", "rank", "rank and parent", "fork server", "all")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert [name for name in left_over() if name.startswith("/dev/shm/manyhands")] == []


def begin(folder: Path, out: str, way: str, every: str = "0") -> Child:
    arguments = ["train", "noisy.py:noisy", "--out", out, "--resume", *COMMON, *WAYS[way]]
    return Child(*arguments, "--checkpoint-every", every, folder=folder)


def children(pid: int) -> list[int]:
    """The child processes of a process, if it is still alive."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, thread.read_text().split())
        except OSError:
            continue
    return found


def victims(parent: int, who: str, generator: random.Random) -> list[int]:
    """The processes to kill: the command, its fork server, or a rank."""
    servers = children(parent)
    ranks = [rank for server in servers for rank in children(server)]
    one = [generator.choice(ranks)] if ranks else []
    found = {
        "parent": [parent],
        "rank": one,
        "rank and parent": [*one, parent],
        "fork server": servers[:1],
        "all": [parent, *servers, *ranks],
    }[who]
    return found or [parent]


def last_step(folder: RunFolder) -> int:
    paths = Checkpoints(folder.checkpoints, "").paths()
    return int(paths[-1].stem.removeprefix("step-")) if paths else 0


def strike(child: Child, folder: RunFolder, step: int, who: str, generator: random.Random) -> bool:
    """Kill when this step is saved; return whether the kill came before the run was over."""
    child.wait_until(lambda: last_step(folder) >= step)
    time.sleep(generator.uniform(0.0, 0.05))  # anywhere within a step, a checkpoint or an evaluation
    for pid in victims(child.pid, who, generator):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return child.end() != 0


def moments(run: RunFolder) -> list[tuple[object, ...]]:
    def one(step: StepRecord) -> tuple[object, ...]:
        return step.step, step.samples, repr(step.loss), step.lr, step.metric

    return [one(step) for step in run.steps()]


def check_equal(uninterrupted: RunFolder, killed: RunFolder) -> None:
    """Compare the model, the last checkpoint and the journal, to the last bit."""
    for path, other in (
        (uninterrupted.model, killed.model),
        tuple(Checkpoints(run.checkpoints, "").paths()[-1] for run in (uninterrupted, killed)),
    ):
        expected, found = load_file(path), load_file(other)
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), (str(other), name)
    assert moments(killed) == moments(uninterrupted)
    assert [step.step for step in killed.steps()] == list(range(1, len(uninterrupted.steps()) + 1))


@pytest.mark.alone
def test_killed_at_random_every_run_ends_with_the_same_bits(
    tmp_path: Path, count: int | None, drawn: random.Random, say: Callable[[str], None]
) -> None:
    (tmp_path / "noisy.py").write_text(TASK)
    uninterrupted_runs: dict[str, RunFolder] = {}
    hits: Counter[str] = Counter()
    kills: Counter[str] = Counter()
    late = number = 0
    while hits.total() < (RUNS if count is None else count):
        ways = list(WAYS)
        way = ways[number % len(ways)]
        if way not in uninterrupted_runs:
            child = begin(tmp_path, f"uninterrupted-{len(uninterrupted_runs)}", way)
            assert child.end() == 0, child.output
            uninterrupted_runs[way] = RunFolder(tmp_path / f"uninterrupted-{ways.index(way)}")
        total = uninterrupted_runs[way].steps()[-1].step
        folder, every = RunFolder(tmp_path / f"killed-{number}"), drawn.choice(["0", "0", "0.05"])
        number += 1
        hit = False
        for step in sorted(drawn.sample(range(1, total - 2), drawn.choice([1, 1, 1, 2, 3]))):
            if step <= last_step(folder):
                continue
            who = drawn.choice(VICTIMS)
            if not strike(begin(tmp_path, folder.path.name, way, every), folder, step, who, drawn):
                break  # it was over before the kill
            hit = True
            kills[who] += 1
        child = begin(tmp_path, folder.path.name, way, every)
        assert child.end() == 0, (way, child.output)
        check_equal(uninterrupted_runs[way], folder)
        hits[way] += hit
        late += not hit
    summary = (
        f"{hits.total()} killed runs ended with the same bits ({kills.total()} kills; {late} came too late)"
    )
    counts = (f"  {times:3d} {name}" for name, times in (*sorted(hits.items()), *sorted(kills.items())))
    say("\n".join([summary, *counts]))
