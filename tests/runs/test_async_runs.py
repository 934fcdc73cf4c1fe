"""Runs whose workers go at their own pace, as a user starts them: what they learn, how they end and go on."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections import Counter
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import manyhands as mh
from conftest import AS_ROOT, called
from manyhands.callbacks.base import Callback
from manyhands.core.errors import DivergedError, InterruptedRunError
from manyhands.engine.checkpoint.storage import Checkpoints
from manyhands.engine.fault_injection import faults
from manyhands.recipes.members import constant
from manyhands.records.record import RunRecord, StepRecord
from manyhands.records.run_folder import RunFolder
from manyhands.records.spec import RunSpec
from manyhands.runs.defaults import fill_in
from manyhands.runs.train import run
from manyhands.strategies.asynchronous.parameter_server import server
from manyhands.tasks.quadratic import quadratic
from manyhands.testing import scripted
from manyhands.testing.delayed import DelayedTransport
from manyhands.transports.base import Transport
from manyhands.transports.threads import ThreadGroup

BIN = Path(sys.executable).parent
MPI = find_spec("mpi4py") is not None and (BIN / "mpirun").exists()
MOMENTUM = {"recipe": "constant", "recipe_options": {"lr": 0.05, "momentum": 0.9}}
N = 1000  # points of the quadratic, 100 a batch

# A norm whose inputs are far from what it expects at first, and steps that take a while.
TASKS = """
import torch, manyhands as mh
from torch import nn

def made(model, width=16):
    inputs = torch.randn(600, width, generator=torch.Generator().manual_seed(0))
    data = mh.ArrayData(inputs + 3, (inputs.sum(1) > 0).long())
    loss = nn.functional.cross_entropy
    return mh.Task(name="made", model=model, train=data, test=data, loss=loss, target=0.9,
                   evaluation_batch=50)

def normed() -> mh.Task:
    return made(lambda: nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)))

def heavy() -> mh.Task:
    return made(lambda: nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 2)), 256)
"""


def train(out: Path, task: str = "quadratic", **settings: Any) -> RunRecord:
    return mh.train(task, out=out, quiet=True, **{"threads": 1, **settings})


def resume(folder: Path, **settings: Any) -> RunRecord:
    return mh.train(str(folder), resume=True, quiet=True, **settings)


def model(folder: Path) -> dict[str, Tensor]:
    return load_file(RunFolder(folder).model)


def distance(first: Path, second: Path) -> float:
    mine, theirs = model(first), model(second)
    assert mine.keys() == theirs.keys()
    return max((mine[name] - theirs[name]).abs().max().item() for name in mine)


def is_accounted_for(record: RunRecord, first: int = 1) -> list[StepRecord]:
    """Each sample once an epoch; each step told once, with its worker; nothing counted twice or left out."""
    steps = RunFolder(Path(record.run)).steps()
    assert [step.step for step in steps] == list(range(1, record.steps + 1))
    assert steps[-1].samples == record.samples
    assert all(before.samples < after.samples for before, after in pairwise(steps))
    mine = steps[first - 1 :]
    assert sum(record.staleness.values()) == len(mine)
    assert Counter(step.staleness for step in mine) == record.staleness
    by_worker = Counter(step.worker for step in mine)
    assert [share.steps for share in record.shares] == [by_worker[rank] for rank in range(record.spec.ranks)]
    before = steps[first - 2].samples if first > 1 else 0
    assert sum(share.samples for share in record.shares) == record.samples - before
    assert all(share.samples == 0 for share in record.shares[: record.spec.servers])
    return steps


# ---- what they learn

WAYS: dict[str, dict[str, Any]] = {
    "hogwild": {"strategy": "hogwild"},
    "one server": {"strategy": "server"},
    "two servers": {"strategy": "server", "strategy_options": {"servers": 2}},
}


@pytest.mark.parametrize("way", WAYS)
def test_with_one_worker_they_are_single(here: Path, way: str) -> None:
    """To the last bit: one worker alone has no stale gradients."""
    settings = {**MOMENTUM, "epochs": 3, "options": {"n": 1001}}
    train(here / "single", **settings)
    record = train(here / "other", workers=1, **WAYS[way], **settings)
    assert distance(here / "single", here / "other") == 0.0
    assert set(record.staleness) == {0}
    is_accounted_for(record)


def test_rounds_that_wait_for_all_are_single(here: Path) -> None:
    """Law 4, with an evaluation every third batch after which one worker may come back later."""
    settings: dict[str, Any] = {**MOMENTUM, "epochs": 4, "options": {"n": 1001}, "evaluate_every": 0.3}
    train(here / "single", **settings)
    record = train(here / "rounds", strategy="server", strategy_options={"backup": 0}, workers=2, **settings)
    assert distance(here / "single", here / "rounds") < 1e-5
    assert all(share.dropped == 0 for share in record.shares)
    is_accounted_for(record)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("hogwild", {}),
        ("server", {}),
        ("server", {"servers": 2, "staleness_aware": True}),
        ("server", {"bound": 1}),
        ("server", {"backup": 1}),
        ("server", {"push_every": 2, "pull_every": 3}),
        ("average", {"every": 4}),
    ],
    ids=str,
)
def test_two_workers_learn_it_all_the_same(here: Path, strategy: str, options: dict[str, Any]) -> None:
    record = train(
        here / "run", strategy=strategy, strategy_options=options, workers=2, epochs=10, target=0.01
    )
    assert record.status == "finished"
    assert record.reached, record.metric
    assert record.samples == 10 * N
    assert sum(share.samples for share in record.shares) == record.samples
    if strategy != "average" and "push_every" not in options:
        is_accounted_for(record)


@pytest.mark.parametrize("strategy", ["hogwild", "server", pytest.param("average", marks=pytest.mark.soak)])
def test_digits_are_learned(here: Path, strategy: str) -> None:
    record = train(here / "run", "digits-mlp", strategy=strategy, workers=2)
    assert record.target == 0.96
    assert record.reached, record.metric
    if strategy == "average":
        return
    steps = is_accounted_for(record)
    assert {step.worker for step in steps} == set(range(record.spec.servers, record.spec.ranks))
    assert [step.samples for step in steps if step.metric is not None] == [1437 * k for k in range(1, 21)]


def test_sparse_gradients_are_written_where_they_are(here: Path) -> None:
    """From one half, which guessing gives, in a few epochs."""
    options = {"n": 2000, "features": 500}
    record = train(
        here / "run", "sparse-logistic", options=options, strategy="hogwild", workers=2, batch=16, epochs=3
    )
    assert record.metric is not None
    assert record.metric > 0.75
    is_accounted_for(record)


@pytest.mark.parametrize(
    "settings", [WAYS["hogwild"], WAYS["two servers"], {"strategy": "average"}], ids=lambda s: s["strategy"]
)
def test_a_batch_norm_learns_its_statistics(here: Path, settings: dict[str, Any]) -> None:
    """Each worker sees its own samples; together they know the mean of all, 3."""
    (here / "own.py").write_text(TASKS)
    record = train(
        here / "run", "own.py:normed", workers=2, batch=20, epochs=6, recipe="constant", lr=0.1, **settings
    )
    held = model(here / "run")
    assert (held["0.running_mean"] - 3).abs().max() < 0.7
    assert (held["0.running_var"] - 1).abs().max() < 0.9
    assert record.metric is not None
    assert record.metric > 0.9
    tracked = int(held["0.num_batches_tracked"])
    if settings["strategy"] == "server":
        assert tracked == record.steps
    else:
        assert 0.8 * record.steps <= tracked <= record.steps


# ---- what ends them


@pytest.mark.parametrize("way", WAYS)
def test_the_time_is_over(here: Path, way: str) -> None:
    record = train(here / "run", workers=2, seconds=0.2, epochs=1_000_000, **WAYS[way])
    assert record.status == "finished"
    assert record.training_seconds >= 0.2
    assert record.metric is not None
    is_accounted_for(record)


@pytest.mark.parametrize("way", ["hogwild", "one server"])
def test_the_target_is_reached(here: Path, way: str) -> None:
    record = train(here / "run", workers=2, epochs=1000, stop_at_target=True, target=0.01, **WAYS[way])
    assert record.status == "target"
    assert record.target_samples == record.samples < 1000 * N
    assert RunFolder(here / "run").steps()[-1].metric == record.metric
    is_accounted_for(record)


@pytest.mark.parametrize(
    ("way", "batch"),
    [("hogwild", 100), ("hogwild", N), ("one server", N), ("two servers", 100)],  # N: just before a test
)
def test_divergence_is_said_once(here: Path, way: str, batch: int) -> None:
    """When all have gone home: a server that stopped listening at once left workers without an answer."""
    with pytest.raises(DivergedError, match=r"^the loss became (nan|inf) at step [\d,]+ \(.* with learning"):
        train(here / "run", workers=2, lr=1e6, epochs=100, batch=batch, **WAYS[way])
    record = RunFolder(here / "run").record()
    assert record is not None
    assert record.status == "diverged"


@pytest.mark.parametrize("way", ["hogwild", "two servers"])
def test_double_precision_in_small_pieces_often_evaluated(here: Path, way: str) -> None:
    settings = {"dtype": "float64", "accumulate": 3, "evaluate_every": 0.3, "batch": 64}
    record = train(here / "run", workers=2, epochs=2, **settings, **WAYS[way])
    steps = is_accounted_for(record)
    assert record.samples == 2 * N
    assert all(tensor.dtype == torch.float64 for tensor in model(here / "run").values())
    evaluated = [step.samples for step in steps if step.metric is not None]
    assert len(evaluated) == 7  # at 300, 600, ..., 1800 and 2000
    for wanted, found in zip([*range(300, 2000, 300), 2000], evaluated, strict=True):
        assert wanted <= found < wanted + 32 or found == 2000


# ---- going on


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_was_stopped_goes_on(here: Path, way: str) -> None:
    """Between two fences, at whatever pieces were under way: none is lost, none is used twice."""

    class At(Callback):
        def on_step(self, step: StepRecord) -> None:
            if step.step == 25:
                os.kill(os.getpid(), signal.SIGTERM)

    settings = fill_in({"workers": 2, "threads": 1, "epochs": 100_000, "evaluate_every": 50.0, **WAYS[way]})
    with pytest.raises(InterruptedRunError, match=r"^interrupted by SIGTERM at step [\d,]+; the last"):
        run(RunSpec.of(task="quadratic", **settings), out=here / "run", callbacks=[At()])
    stopped = RunFolder(here / "run").record()
    assert stopped is not None
    assert stopped.status == "interrupted"
    is_accounted_for(stopped)
    record = resume(here / "run", allow_changes=True, samples=stopped.samples + 5 * N)
    assert (record.status, record.resumed) == ("finished", 1)
    assert 0 <= record.samples - stopped.samples - 5 * N < 50
    is_accounted_for(record, first=stopped.steps + 1)


SINGLE: dict[str, Any] = {"strategy": "single"}
SUMS = {"strategy": "allreduce", "workers": 2}
ROUNDS = {"strategy": "server", "strategy_options": {"backup": 0}, "workers": 2}


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (WAYS["one server"], SINGLE),
        (WAYS["two servers"], SUMS),
        (WAYS["hogwild"], WAYS["two servers"]),
        (SINGLE, WAYS["two servers"]),
        (SUMS, WAYS["hogwild"]),
        (ROUNDS, WAYS["one server"]),
        (SUMS, ROUNDS),
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_any_strategy_goes_on_from_anothers_checkpoint(
    here: Path, first: dict[str, Any], then: dict[str, Any]
) -> None:
    """Those that are exact with so many workers end where one worker does, momentum and all."""
    settings: dict[str, Any] = {**MOMENTUM, "epochs": 4, "dtype": "float64"}
    train(here / "single", **settings)
    half = train(here / "run", samples=2300, **settings, **first)
    assert half.samples == 2300
    tensors = load_file(Checkpoints(RunFolder(here / "run").checkpoints, "").paths()[-1])
    assert "optimizer/momentum_buffer/weight" in tensors
    record = resume(here / "run", allow_changes=True, samples=10 * N, **{"workers": 1, **then})
    assert (record.status, record.resumed, record.samples) == ("finished", 1, 4 * N)
    assert distance(here / "single", here / "run") < 1e-12


def test_a_finished_run_is_not_run_again(here: Path) -> None:
    record = train(here / "run", strategy="hogwild", workers=2, epochs=1)
    again = resume(here / "run")
    assert again == record
    longer = resume(here / "run", allow_changes=True, epochs=3)
    assert (longer.samples, longer.resumed) == (3 * N, 1)
    is_accounted_for(longer, first=record.steps + 1)


# ---- stragglers


@pytest.mark.parametrize(("strategy", "slow"), [("hogwild", 1), ("server", 2)])
def test_a_straggler_does_less_and_nobody_waits_for_it(
    here: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, slow: int
) -> None:
    (here / "own.py").write_text(TASKS)
    monkeypatch.setenv(faults.SLOW, f"6@{slow}")
    record = train(here / "run", "own.py:heavy", strategy=strategy, workers=2, batch=100, epochs=12, lr=0.01)
    is_accounted_for(record)
    fast = record.shares[slow - 1].samples
    assert record.shares[slow].samples < 0.6 * fast


def test_all_wait_for_a_straggler_where_they_step_together(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "own.py").write_text(TASKS)
    monkeypatch.setenv(faults.SLOW, "6@1")
    record = train(here / "run", "own.py:heavy", workers=2, batch=100, epochs=6, lr=0.01)
    first, straggler = record.phases
    assert record.shares[0].samples == record.shares[1].samples
    assert first["wait"] > 0.5 * record.training_seconds
    assert straggler["wait"] < 0.5 * first["wait"]


def test_a_worker_far_away_does_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host of its own behind a slow network; what is said and pushed are messages."""
    monkeypatch.setattr(
        scripted, "ThreadGroup", lambda size, timeout: ThreadGroup(size, timeout, hosts="abc")
    )

    def away(inner: Transport, _: object) -> Transport:
        return DelayedTransport(inner, latency=0.005) if inner.rank == 2 else inner

    monkeypatch.setattr(scripted, "Scripted", away)
    spec = RunSpec(task="quadratic", strategy="server", workers=2, batch=20, epochs=2, target=0.0)
    played = scripted.play(server, quadratic(n=500), constant(lr=0.05), spec, [])
    assert sum(share.samples for share in played.shares) == 2 * 500
    assert 0 < played.shares[2].samples < 0.6 * played.shares[1].samples


# ---- what is said


def heard(here: Path, **settings: Any) -> list[str]:
    notices: list[str] = []

    class Hear(Callback):
        def on_notice(self, text: str) -> None:
            notices.append(text)

    spec = RunSpec.of(task="quadratic", **fill_in({"epochs": 1, "threads": 1, **settings}))
    run(spec, out=here / f"run{len(list(here.iterdir()))}", callbacks=[Hear()])
    return [text for text in notices if "momentum" in text]


def test_momentum_with_hogwild_is_warned_of_once(here: Path) -> None:
    given = {"strategy": "hogwild", "recipe_options": {"momentum": 0.9, "lr": 0.02}}
    (text,) = heard(here, workers=2, **given)
    assert re.match(r"momentum 0\.9 with hogwild: momentum adds old gradients to updates that ", text)
    assert heard(here, workers=1, **given) == []
    assert heard(here, workers=2, strategy="hogwild") == []  # the task's own is left out
    assert heard(here, workers=2, **{**given, "strategy": "server"}) == []  # which keeps it in one place


# ---- between processes that share no memory


def test_a_server_by_messages_of_torch(here: Path) -> None:
    """Two servers and one worker are exact; two workers are as good as anywhere."""
    settings: dict[str, Any] = {**MOMENTUM, "epochs": 2, "dtype": "float64"}
    train(here / "single", **settings)
    record = train(here / "exact", transport="torch", workers=1, **WAYS["two servers"], **settings)
    assert distance(here / "single", here / "exact") < 1e-12
    is_accounted_for(record)
    record = train(here / "two", transport="torch", workers=2, strategy="server", epochs=10)
    assert record.reached, record.metric
    is_accounted_for(record)


def by_mpirun(folder: Path, ranks: int, *words: str) -> RunRecord:
    """As the documentation says, and a machine with fewer cores than ranks must be told."""
    command = [BIN / "mpirun", "-n", f"{ranks}", "--map-by", ":OVERSUBSCRIBE", BIN / "manyhands", "train"]
    answer = called([*command, *words, "--out", "run", "--json"], folder, **AS_ROOT)
    assert answer.code == 0, answer.err
    return RunRecord.model_validate_json(answer.out)


@pytest.mark.soak
@pytest.mark.skipif(not MPI, reason="mpi4py or mpirun is not installed")
def test_weights_are_averaged_under_mpirun(here: Path) -> None:
    """`mpirun -n 2 manyhands train digits-mlp --strategy average --every 16`."""
    record = by_mpirun(here, 2, "digits-mlp", "--strategy", "average", "--every", "16", "--samples", "1280")
    assert (record.spec.transport, record.spec.launcher, record.spec.workers) == ("mpi", "env", 2)
    assert record.spec.strategy_options == {"every": 16}
    assert record.samples == 1280
    assert all(traffic["all_reduce"]["calls"] for traffic in record.traffic)


@pytest.mark.slow
@pytest.mark.skipif(not MPI, reason="mpi4py or mpirun is not installed")
def test_a_server_is_a_rank_of_mpirun(here: Path) -> None:
    """`mpirun -n 3 manyhands train digits-mlp --strategy server`, in memory and by messages."""
    words = ["digits-mlp", "--strategy", "server", "--epochs", "5", "--transport", "mpi"]
    record = by_mpirun(here, 3, *words)
    assert (record.spec.transport, record.spec.launcher) == ("mpi", "env")
    assert (record.spec.workers, record.spec.servers, record.spec.ranks) == (2, 1, 3)
    assert record.reached, record.metric
    assert record.samples == 5 * 1437
    assert [share.samples > 0 for share in record.shares] == [False, True, True]
    is_accounted_for(record)
