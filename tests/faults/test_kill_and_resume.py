"""Law 6: a run killed at any moment resumes bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from children import Child
from conftest import Answer
from manyhands import load, train
from manyhands.engine.checkpoint.storage import Checkpoints
from manyhands.engine.checkpoint.storage import load as load_checkpoint
from manyhands.records.run_folder import RunFolder

# Dropout uses torch's generator and the schedule changes every step: what is not restored changes the result.
TASK = '''
import torch
import manyhands as mh

def noisy() -> mh.Task:
    """A small network with dropout and batch norm on random points."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1024, 16, generator=generator)
    data = mh.ArrayData(inputs, (inputs.sum(1) > 0).long())
    return mh.Task(name="noisy", model=model, train=data, test=data,
                   loss=torch.nn.functional.cross_entropy, target=0.99)

def model():
    from torch import nn
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 2))
'''
SETTINGS = ["--batch", "48", "--epochs", "6", "--threads", "1", "--checkpoint-every", "0", "--quiet"]
OPTIMIZERS = {"sgd": [], "adamw": ["--set", "recipe.optimizer=adamw"], "lamb": ["--recipe", "lamb"]}


def noisy(folder: Path, out: str, *words: str) -> Child:
    return Child("train", "noisy.py:noisy", "--out", out, *SETTINGS, *words, folder=folder)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_killed_several_times_it_ends_with_the_same_bits(tmp_path: Path, optimizer: str) -> None:
    """SIGKILL at random steps; every tensor of the last checkpoint equals the uninterrupted run's."""
    (tmp_path / "noisy.py").write_text(TASK)
    extra = OPTIMIZERS[optimizer]
    assert noisy(tmp_path, "whole", *extra).end() == 0
    total = load(tmp_path / "whole").steps
    generator = random.Random(optimizer)
    kills = sorted(generator.sample(range(2, total - 2), 4 if optimizer == "sgd" else 2))
    folder = RunFolder(tmp_path / "killed")
    for step in kills:
        child = noisy(tmp_path, "killed", "--resume", *extra)
        child.wait_until(lambda step=step: _last_step(folder) >= step)
        child.kill()
    assert noisy(tmp_path, "killed", "--resume", *extra).end() == 0

    whole, killed = RunFolder(tmp_path / "whole"), folder
    for name, tensor in load_file(whole.model).items():
        assert torch.equal(load_file(killed.model)[name], tensor), name
    last = [
        load_checkpoint(Checkpoints(run.checkpoints, "").paths()[-1], frozenset({run.spec().id}))
        for run in (whole, killed)
    ]
    for name, tensor in last[0].tensors.items():
        assert torch.equal(last[1].tensors[name], tensor), name
    assert load(killed.path).resumed >= 1
    journals = [[(s.step, s.samples, s.loss, s.lr, s.metric) for s in run.steps()] for run in (whole, killed)]
    assert journals[0] == journals[1]


def _last_step(folder: RunFolder) -> int:
    paths = Checkpoints(folder.checkpoints, "").paths()
    return int(paths[-1].stem.removeprefix("step-")) if paths else 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_continue(tmp_path: Path, number: signal.Signals, code: int) -> None:
    words = ["--epochs", "100000", "--out", "run", "--checkpoint-every", "1000"]
    child = Child("train", "quadratic", *words, folder=tmp_path)
    steps = tmp_path / "run/steps.jsonl"
    child.wait_until(lambda: steps.is_file() and steps.stat().st_size > 0)
    child.send(number)
    assert child.end() == code
    record = load(tmp_path / "run")
    assert record.status == "interrupted"
    expected = (
        f"error: interrupted by {number.name} at step {record.steps:,}; the last checkpoint is of step "
        f"{record.steps:,}; continue with: manyhands train --resume run"
    )
    assert child.output.strip().splitlines()[-1] == expected
    assert len(RunFolder(tmp_path / "run").steps()) == record.steps


def test_a_damaged_last_checkpoint_costs_only_its_steps(here: Path) -> None:
    settings = {"batch": 100, "epochs": 4, "checkpoint_every": 0, "threads": 1, "quiet": True}
    whole = train("digits-mlp", out=here / "whole", **settings)
    cut = train("digits-mlp", out=here / "cut", samples=3000, **settings)
    folder = RunFolder(Path(cut.run))
    last = Checkpoints(folder.checkpoints, "").paths()[-1]
    last.write_bytes(last.read_bytes()[:-5])
    resumed = train("digits-mlp", out=here / "cut", resume=True, allow_changes=True, **settings)
    assert resumed.resumed == 1
    for name, tensor in load_file(RunFolder(Path(whole.run)).model).items():
        assert torch.equal(load_file(folder.model)[name], tensor), name


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system of its own needs root")
def test_a_full_disk_gives_one_message_and_nothing_is_lost(
    tmp_path: Path, typed: Callable[..., Answer]
) -> None:
    """A real file system of 8 MB; the run resumes once there is space."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        words = ["train", "quadratic", "--set", "dimensions=100000", "--set", "n=100", "--batch", "10"]
        words += ["--set", "recipe.momentum=0.9", "--epochs", "3", "--checkpoint-every", "0", "--keep", "50"]
        words += ["--out", str(disk / "run"), "--quiet", "--threads", "1"]
        answer = typed(*words)
        assert answer.code == 1
        assert len(answer.err.strip().splitlines()) == 1
        assert "no space left on device" in answer.err
        assert f"continue with: manyhands train --resume {disk / 'run'}" in answer.err
        checkpoints = sorted(path.name for path in (disk / "run/checkpoints").iterdir())
        assert checkpoints
        assert not any("partial" in name for name in checkpoints)
        subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
        assert typed("train", "--resume", str(disk / "run"), "--quiet").code == 0
        finished = load(disk / "run")
        assert finished.resumed == 1
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    whole = train(
        "quadratic",
        options={"dimensions": 100000, "n": 100},
        batch=10,
        recipe_options={"momentum": 0.9},
        epochs=3,
        out=tmp_path / "whole",
        threads=1,
        quiet=True,
    )
    assert whole.metric == finished.metric
