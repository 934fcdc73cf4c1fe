"""Local SGD as a user runs it: killed, stopped, resumed with other workers, diverged; nothing is lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import manyhands as mh
from children import Child
from manyhands import cli
from manyhands.callbacks.base import Callback
from manyhands.core.errors import DivergedError, InterruptedRunError, UsageError, WorkerFailedError
from manyhands.engine.checkpoint.storage import Checkpoints
from manyhands.engine.fault_injection import faults
from manyhands.records.record import RunRecord, StepRecord
from manyhands.records.run_folder import RunFolder
from manyhands.records.spec import RunSpec
from manyhands.runs.train import run

pytestmark = pytest.mark.usefixtures("one_core")
EPOCHS, STEPS = 4, 4 * 29  # of 1,437 samples, 50 at a time, the last 37


def train(out: Path, workers: int = 2, options: dict[str, Any] | None = None, **settings: Any) -> RunRecord:
    common = {"epochs": EPOCHS, "batch": 50, "out": out, "quiet": True, **settings}
    return mh.train(
        "digits-mlp", strategy="average", workers=workers, strategy_options=options or {}, **common
    )


def last(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a run's last checkpoint."""
    return load_file(Checkpoints(RunFolder(folder).checkpoints, "").paths()[-1])


def journal(folder: Path) -> list[tuple[Any, ...]]:
    steps = RunFolder(folder).steps()
    return [(step.step, step.samples, step.loss, step.lr, step.metric) for step in steps]


def equal(first: Path, second: Path) -> None:
    """The same steps, the same tensors, to the last bit."""
    assert journal(first) == journal(second)
    expected, found = last(first), last(second)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    model = load_file(RunFolder(first).model)
    assert all(torch.equal(load_file(RunFolder(second).model)[name], model[name]) for name in model)


def killed(here: Path, options: dict[str, Any], workers: int, checkpoints: int) -> dict[str, torch.Tensor]:
    """Kill a run after this many checkpoints, and return the tensors of the last one."""
    words = ["--workers", f"{workers}", "--epochs", f"{EPOCHS}", "--batch", "50", "--keep", "100"]
    words += [word for name, value in options.items() for word in ("--set", f"strategy.{name}={value}")]
    words += ["--checkpoint-every", "0", "--quiet", "--out", "killed"]
    child = Child("train", "digits-mlp", "--strategy", "average", *words, folder=here)
    written = Checkpoints(here / "killed/checkpoints", "")
    child.wait_until(lambda: len(written.paths()) >= checkpoints)
    child.kill()
    return last(here / "killed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "checkpoints", "apart"),
    [
        ({"every": 4}, 3, False),
        # workers communicate at step 32, in the middle of a round
        ({"every": 50, "outer": "nesterov"}, 1, True),
    ],
    ids=str,
)
def test_killed_it_resumes_bit_for_bit(
    here: Path, options: dict[str, Any], checkpoints: int, apart: bool
) -> None:
    train(here / "whole", 2, options)
    held = killed(here, options, 2, checkpoints)
    if len(Checkpoints(here / "killed/checkpoints", "").paths()) == checkpoints:  # killed at once
        assert any(name.startswith("workers/1/") for name in held) == apart
    record = mh.train(str(here / "killed"), resume=True, checkpoint_every=60, quiet=True)
    assert (record.resumed, record.steps, record.status) == (1, STEPS, "finished")
    equal(here / "whole", here / "killed")


@pytest.fixture(scope="module")
def torn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two workers that was killed in the middle of a round."""
    folder = tmp_path_factory.mktemp("torn")
    killed(folder, {"every": 50}, 2, 1)
    return folder / "killed"


@pytest.mark.parametrize(
    ("then", "strategy"), [(3, "average"), (1, "average"), (2, "allreduce"), (1, "single")]
)
def test_other_strategies_and_workers_resume_from_the_average(
    here: Path, torn: Path, then: int, strategy: str
) -> None:
    folder = shutil.copytree(torn, here / "run")
    settings: dict[str, Any] = {"workers": then, "strategy": strategy, "checkpoint_every": 60}
    record = mh.train(str(folder), resume=True, quiet=True, **settings)
    assert (record.resumed, record.steps, record.spec.strategy) == (1, STEPS, strategy)
    assert record.metric is not None
    assert record.metric > 0.9


def test_a_run_of_another_strategy_resumes_with_averages(here: Path) -> None:
    settings = {"epochs": EPOCHS, "batch": 50, "out": here / "run", "quiet": True}
    mh.train("digits-mlp", workers=2, samples=2000, **settings)
    record = mh.train(
        str(here / "run"),
        resume=True,
        allow_changes=True,
        samples=5000,
        strategy="average",
        strategy_options={"every": 4},
        quiet=True,
    )
    assert (record.spec.strategy, record.resumed) == ("average", 1)
    assert record.metric is not None
    assert record.metric > 0.9


def test_a_run_resumes_with_another_interval(here: Path, torn: Path) -> None:
    """Like another number of workers: --allow-changes is not needed."""
    folder = shutil.copytree(torn, here / "run")
    notices: list[str] = []

    class Notices(Callback):
        def on_notice(self, text: str) -> None:
            notices.append(text)

    from manyhands.runs.train import resume_folder

    settings = {"strategy_options": {"every": 8}, "checkpoint_every": 60}
    record = resume_folder(folder, settings, callbacks=[Notices()])
    assert record.spec.strategy_options == {"every": 8}
    assert (record.resumed, record.steps) == (1, STEPS)
    assert any(
        text.startswith("continuing with strategy.every 50 -> 8: the same samples in") for text in notices
    )


# Messages, votes between them, and the parameters of each worker in the checkpoint.
ELASTIC = {"every": 50, "outer": "elastic"}


@pytest.fixture(scope="module")
def on_shm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on shm, to compare with."""
    folder = tmp_path_factory.mktemp("shm")
    train(folder, options=ELASTIC, epochs=2, threads=1)
    return folder


@pytest.mark.parametrize("transport", ["torch", *(["mpi"] if find_spec("mpi4py") else [])])
def test_any_transport_gives_the_same_bits(here: Path, on_shm: Path, transport: str) -> None:
    train(here / transport, options=ELASTIC, epochs=2, threads=1, transport=transport)
    equal(on_shm, here / transport)


def test_a_signal_is_noticed_between_two_averages(here: Path) -> None:
    class At(Callback):
        def on_step(self, step: StepRecord) -> None:
            if step.step == 5:
                os.kill(os.getpid(), signal.SIGINT)

    spec = RunSpec.of(
        task="quadratic",
        workers=2,
        strategy="average",
        strategy_options={"every": "end"},
        transport="shm",
        launcher="local",
        epochs=1000,
    )
    with pytest.raises(InterruptedRunError, match=r"^interrupted by SIGINT at step [\d,]+; the last"):
        run(spec, out=here / "run", callbacks=[At()])
    record = RunFolder(here / "run").record()
    assert record is not None
    assert record.status == "interrupted"
    assert record.steps % 32 == 0
    assert any(name.startswith("workers/1/") for name in last(here / "run"))


def test_the_time_limit_ends_all_workers_at_once(here: Path) -> None:
    settings: dict[str, Any] = {"strategy": "average", "strategy_options": {"every": "end"}, "workers": 2}
    record = mh.train("quadratic", seconds=0.2, epochs=1_000_000, out=here / "run", quiet=True, **settings)
    assert record.status == "finished"
    assert 0.2 <= record.training_seconds < 60  # a million epochs would take hours
    assert not any(name.startswith("workers/") for name in last(here / "run"))


def test_a_worker_that_fails_is_started_again_from_the_last_checkpoint(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(here / "whole", options={"every": 50}, epochs=3)
    monkeypatch.setenv(faults.VARIABLE, "SIGKILL@1:40:backward")
    with pytest.raises(WorkerFailedError, match=r"^worker 1 of 2 .* was killed by signal 9 .*at step 40"):
        train(here / "ended", options={"every": 50}, epochs=3, checkpoint_every=0)
    record = train(here / "again", options={"every": 50}, epochs=3, checkpoint_every=0, restarts=1)
    assert (record.status, record.resumed) == ("finished", 1)
    equal(here / "whole", here / "again")


def test_diloco_killed_after_an_average_resumes_with_each_ranks_own_optimizer(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All models are equal then, but the workers are not: each has its own momentum."""
    diloco = {"every": 4, "outer": "nesterov"}
    train(here / "whole", options=diloco, epochs=1)
    monkeypatch.setenv(faults.VARIABLE, "SIGKILL@1:14:backward")
    record = train(here / "again", options=diloco, epochs=1, checkpoint_every=0, keep=100, restarts=1)
    assert (record.status, record.resumed) == ("finished", 1)
    equal(here / "whole", here / "again")
    paths = Checkpoints(RunFolder(here / "again").checkpoints, "").paths()
    held = load_file(next(path for path in paths if path.stem == "step-000000012"))
    first, second = (held[f"rank/{rank}/optimizer/momentum_buffer/1.weight"] for rank in range(2))
    assert not torch.equal(first, second)
    assert not any(name.startswith("workers/") for name in held)


@pytest.mark.parametrize(("every", "epochs"), [(4, 20), ("end", 20), ("end", 1)])
def test_divergence_is_reported_once(here: Path, every: int | str, epochs: int) -> None:
    """Also if the run is over before workers have communicated again: 10 steps are fewer than 32."""
    settings: dict[str, Any] = {"strategy": "average", "strategy_options": {"every": every}, "workers": 2}
    with pytest.raises(DivergedError, match=r"^the loss became (nan|inf) at step \d+"):
        mh.train("quadratic", lr=1e6, epochs=epochs, out=here / "run", quiet=True, **settings)
    record = RunFolder(here / "run").record()
    assert record is not None
    assert record.status == "diverged"


# ---- verify


def verify(*words: str) -> int:
    return cli.answer(["verify", "digits-mlp", "--strategy", "average", *words])


def test_an_average_per_step_is_verified(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = ["--set", "recipe.momentum=0", "--set", "recipe.nesterov=false"]
    assert verify("--workers", "3", "--set", "strategy.every=1", *plain) == 0
    assert "average with 3 workers on shm equals single after 5 steps" in capsys.readouterr().out
    assert verify("--workers", "2", "--set", "strategy.every=1", "--json") == 0  # with momentum
    found = json.loads(capsys.readouterr().out)
    assert "optimizer/momentum_buffer/1.weight" in found["comparisons"][1]["tensors"]
    assert found["comparisons"][1]["largest"] < 1e-12


def test_what_does_not_equal_one_worker_is_not_verified() -> None:
    from manyhands.runs.verify import compare

    settings: dict[str, Any] = {"strategy": "average", "workers": 2, "transport": "shm", "launcher": "local"}
    for options, sentence in (
        (
            {"every": 16},
            "average with every 16 is not single: models differ between averages; verify it with "
            "--set strategy.every=1",
        ),
        ({"every": 1, "outer": "elastic"}, "average with outer elastic is not single: "),
    ):
        spec = RunSpec.of(task="digits-mlp", strategy_options=options, **settings)
        with pytest.raises(UsageError, match="^" + re.escape(sentence)):
            compare(spec, 3, print)
