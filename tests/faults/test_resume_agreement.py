"""Ranks that see different files resume from one checkpoint, rank 0's, to the last bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from manyhands.core.errors import CheckpointError
from manyhands.core.rank_info import NullChannel, RankInfo
from manyhands.engine.checkpoint.storage import Checkpoint, Checkpoints, load
from manyhands.engine.job import Job
from manyhands.records.run_folder import RunFolder
from manyhands.records.spec import RunSpec
from manyhands.runs.resolve import resolve
from manyhands.transports.threads import ThreadGroup, ThreadsTransport
from manyhands.transports.wrapper import TransportWrapper
from sessions import Sat, together

EPOCH = 100  # samples
SETTINGS: dict[str, Any] = {
    "task": "quadratic", "options": {"n": EPOCH, "dimensions": 20}, "batch": 50, "epochs": 100, "threads": 1,
    "recipe_options": {"momentum": 0.9, "lr": 0.01}, "checkpoint_every": 0, "keep": 50,
}  # fmt: skip
AVERAGE = {"strategy": "average", "transport": "shm", "workers": 2}
STRATEGIES: dict[str, dict[str, Any]] = {
    "allreduce": {"strategy": "allreduce", "transport": "torch", "workers": 2},
    "memory": {"strategy": "allreduce", "transport": "shm", "workers": 2},
    "average": {**AVERAGE, "strategy_options": {"every": 2}},
    # workers keep parameters of their own
    "elastic": {**AVERAGE, "strategy_options": {"every": 2, "outer": "elastic"}},
    "sharded": {"strategy": "sharded", "transport": "torch", "workers": 2},
    "server": {"strategy": "server", "transport": "shm", "workers": 1},
}
HOGWILD = {"strategy": "hogwild", "transport": "shm", "workers": 2}  # no two runs of it are equal


class Begun(NamedTuple):
    """Two epochs of a run of two ranks, the job that resumes it, and the expected result."""

    job: Job  # one more step, then the time limit of rank 0 ends it
    folder: Path
    expected: list[Sat]

    def copy(self, to: Path) -> Path:
        """A copy of the run for rank 0."""
        shutil.copytree(self.folder, to)
        return to

    def split(self, to: Path, keep: Callable[[int], bool]) -> list[Path]:
        """Folders of two ranks; rank 1 has only some of the checkpoints of rank 0."""
        mine, other = self.copy(to / "mine"), self.copy(to / "other")
        for path in Checkpoints(RunFolder(other).checkpoints, "").paths():
            if not keep(int(path.stem.removeprefix("step-"))):
                path.unlink()
        return [mine, other]


@pytest.fixture(scope="module")
def begin(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Begun]:
    rows = STRATEGIES | {"hogwild": HOGWILD}

    @cache
    def make(name: str) -> Begun:
        folder = tmp_path_factory.mktemp(name) / "run"
        RunFolder(folder).create()
        spec = resolve(RunSpec.of(**SETTINGS, **rows[name], seconds=1e-6))
        job = Job(spec, folder, resume=True)
        if name == "allreduce":  # one step per session, with one spec
            RunFolder(folder).write_spec(spec)
            for _ in range(4):
                together(job, [folder] * 2)
        else:
            shorter = resolve(RunSpec.of(**SETTINGS, **rows[name], samples=2 * EPOCH))
            RunFolder(folder).write_spec(shorter)
            together(Job(shorter, folder), [folder] * 2)
            job = replace(job, accept=frozenset({shorter.id}))
        whole = folder.with_name("whole")
        shutil.copytree(folder, whole)
        return Begun(job, folder, together(job, [whole] * 2))

    return make


def check_equal(found: list[Sat], expected: list[Sat]) -> None:
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.model.keys() == other.model.keys()
        for name, tensor in other.model.items():
            assert torch.equal(one.model[name], tensor), f"{name} at rank {rank}"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_without_a_checkpoint_resumes_from_rank_0s(
    tmp_path: Path, begin: Callable[[str], Begun], strategy: str
) -> None:
    """It started from zero without a message, and summed gradients of different batches and parameters."""
    begun = begin(strategy)
    found = together(begun.job, begun.split(tmp_path, lambda step: False))
    check_equal(found, begun.expected)
    assert found[0].steps == begun.expected[0].steps > 4
    assert found[0].resumed == begun.expected[0].resumed >= 1


def test_a_rank_with_an_older_checkpoint_resumes_from_rank_0s(
    tmp_path: Path, begin: Callable[[str], Begun]
) -> None:
    """One epoch behind: all evaluations happened at the same steps, so nothing was noticed."""
    begun = begin("allreduce")
    found = together(begun.job, begun.split(tmp_path, lambda step: step == 2))
    check_equal(found, begun.expected)
    assert [each.steps for each in found] == [5, 5]


def test_hogwild_workers_resume_from_rank_0s(tmp_path: Path, begin: Callable[[str], Begun]) -> None:
    """A worker without a checkpoint did not reach the barrier in which the others waited."""
    begun = begin("hogwild")
    found = together(begun.job, begun.split(tmp_path, lambda step: False))
    assert found[0].steps >= 8
    assert found[0].resumed == 1
    for name, tensor in found[0].model.items():
        assert torch.equal(found[1].model[name], tensor), name


def test_if_rank_0_has_none_all_start_from_the_beginning(
    tmp_path: Path, begin: Callable[[str], Begun]
) -> None:
    begun = begin("allreduce")
    mine, other = begun.split(tmp_path, lambda step: True)
    shutil.rmtree(mine / "checkpoints")
    found = together(begun.job, [mine, other])
    assert [(each.steps, each.resumed) for each in found] == [(1, 0), (1, 0)]
    assert any("has no checkpoint yet: starting from the beginning" in text for text in found[0].notices)
    for name, tensor in found[0].model.items():
        assert torch.equal(found[1].model[name], tensor), name


def test_another_content_under_the_same_name_does_not_matter(
    tmp_path: Path, begin: Callable[[str], Begun]
) -> None:
    begun = begin("allreduce")
    mine, other = begun.split(tmp_path, lambda step: True)
    written = Checkpoints(RunFolder(other).checkpoints, "").paths()
    shutil.copy(written[0], written[-1])
    check_equal(together(begun.job, [mine, other]), begun.expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_forged_checkpoint_is_skipped_by_all(
    tmp_path: Path, begin: Callable[[str], Begun], strategy: str
) -> None:
    """With a valid checksum, and momentum of another shape, which an optimizer would write past."""
    begun = begin(strategy)
    folder = begun.copy(tmp_path / "run")
    last = Checkpoints(RunFolder(folder).checkpoints, "").paths()[-1]
    run = RunFolder(folder).spec().id
    tensors, state = load(last, frozenset({run}))
    tensors["optimizer/momentum_buffer/weight"] = torch.zeros(3)
    step = int(last.stem.removeprefix("step-"))
    Checkpoints(last.parent, run, keep=50).save(step, tensors, state)
    found = together(begun.job, [folder] * 2)
    assert found[0].steps < begun.expected[0].steps
    assert found[0].notices[0] == (
        f"{last}: the checkpoint is of another model: optimizer/momentum_buffer/weight is (3,) instead of "
        "(20,); trying the one before it"
    )


class Garbling(TransportWrapper):
    """A transport that changes what it receives."""

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        got = self.inner.broadcast(tensor, root)
        if got.numel() == 24:  # the parameters
            got[0] += 1
        return got


def saved() -> Checkpoint:
    return Checkpoint({"model/w": torch.arange(3, dtype=torch.float64)}, {"position": {"step": 7}})


def test_a_rank_that_received_something_else_is_named() -> None:
    from manyhands.engine.checkpoint.resume import agree

    group = ThreadGroup(3, timeout=20, hosts=("a", "b", "c"))

    def work(transport: ThreadsTransport) -> Checkpoint | None:
        channel = NullChannel()
        channel.exchange = lambda value: transport._exchange("exchange", value)  # type: ignore[method-assign]
        info = RankInfo(transport.rank, ("a", "b", "c"), channel)
        way = Garbling(transport) if transport.rank == 2 else transport
        return agree(info, way, saved() if transport.rank == 0 else None)

    with pytest.raises(CheckpointError) as caught:
        group.run(work)
    assert str(caught.value).startswith("worker 2 (c) got another checkpoint than worker 0 sent: step 7 (")
