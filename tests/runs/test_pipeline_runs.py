"""Runs of models in stages, as a user starts them: what they leave behind, how they go on, are they exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import manyhands as mh
from manyhands import cli
from manyhands.core.errors import UsageError
from manyhands.launchers.local import LocalLauncher
from manyhands.records.record import RunRecord
from manyhands.records.run_folder import RunFolder
from manyhands.records.spec import RunSpec
from manyhands.runs import autotune
from manyhands.runs import verify as verify_
from manyhands.runs.defaults import fill_in
from manyhands.study import study_file
from manyhands.study.execute import execute
from manyhands.study.view import NoView

# Dropout and batch norm on both sides of the cut: whatever is not restored, shows.
TASKS = """
import torch, manyhands as mh
from torch import nn

def made(model, n=300):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(n, 1, 4, 4, generator=generator)
    data = mh.ArrayData(inputs, (inputs.sum((1, 2, 3)) > 0).long())
    loss = nn.functional.cross_entropy
    return mh.Task(name="made", model=model, train=data, test=data, loss=loss, target=0.99)

def noisy() -> mh.Task:
    return made(lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(inplace=True), nn.Dropout(0.3),
        nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 2)))

def images() -> mh.Task:
    return made(lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 2)))
"""
PIPELINE: dict[str, Any] = {"strategy": "pipeline", "workers": 2, "strategy_options": {"micro_batches": 4}}


def train(out: Path, task: str = "digits-mlp", **settings: Any) -> RunRecord:
    return mh.train(task, out=out, quiet=True, **{"threads": 1, "batch": 100, **settings})


def resume(folder: Path, **settings: Any) -> RunRecord:
    return mh.train(str(folder), resume=True, quiet=True, allow_changes=True, **settings)


def model(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(RunFolder(folder).model)


def same_bits(first: Path, second: Path) -> None:
    one, other = model(first), model(second)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(other[name], tensor), name


def distance(first: Path, second: Path) -> float:
    one, other = model(first), model(second)
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


def test_a_pipeline_is_one_worker_that_accumulates(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bit for bit; and the record, `show` and the spec say where it was cut and into what."""
    record = train(here / "parts", epochs=1, **PIPELINE)
    one = train(here / "one", epochs=1, accumulate=4)
    same_bits(here / "parts", here / "one")
    assert record.metric == one.metric
    assert record.spec.division == "batch 100 = 1 pipeline of 2 stages x 25 x 4 micro-batches"
    first, second = record.choices["stages"]
    assert (first["first"], first["end"], second["end"]) == (0, second["first"], 4)
    assert first["parameters"] + second["parameters"] == record.parameters
    assert [share.samples for share in record.shares] == [1437, 0]  # the first stage reads
    traffic = record.traffic[0]
    assert traffic["copy_shared"]["bytes"] > 0
    assert "activation" in record.traffic[1]  # what the last stage waited for
    assert cli.answer(["show", str(here / "parts")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert f"stages     {record.choices['cut'].removeprefix('cut: ')}" in shown
    assert record.choices["cut"].startswith("cut: blocks 0")


def test_layers_are_one_worker(here: Path) -> None:
    record = train(here / "layers", epochs=1, strategy="layers", workers=2)
    train(here / "one", epochs=1)
    same_bits(here / "layers", here / "one")
    assert record.spec.division == "batch 100 = 1 pipeline of 2 stages x 100 x 1 micro-batch"
    assert len(record.choices["stages"]) == 2


def test_a_run_goes_on_with_other_strategies(here: Path) -> None:
    """Law 6: from a pipeline to all-reduce, to one worker and to layers, with the same samples."""
    whole = train(here / "whole", epochs=2, dtype="float64")
    train(here / "run", epochs=2, dtype="float64", samples=700, **PIPELINE)
    relay: list[dict[str, Any]] = [
        {"strategy": "allreduce", "workers": 2, "samples": 1400},
        {"strategy": "single", "workers": 1, "samples": 2100},
        {"strategy": "layers", "workers": 2, "samples": 3000},
    ]
    for number, settings in enumerate(relay, 1):
        record = resume(here / "run", **settings)
        assert (record.spec.strategy, record.resumed) == (settings["strategy"], number)
    assert record.samples == whole.samples
    assert record.spec.strategy_options == {}
    assert distance(here / "whole", here / "run") < 1e-12


def test_half_and_half_is_the_whole_bit_for_bit(here: Path) -> None:
    (here / "tasks.py").write_text(TASKS)
    options = {"micro_batches": 3, "cut": [5]}
    settings = {"strategy": "pipeline", "workers": 2, "strategy_options": options, "batch": 32, "epochs": 4}
    train(here / "whole", "tasks.py:noisy", **settings)
    train(here / "half", "tasks.py:noisy", samples=500, **settings)
    record = resume(here / "half", samples=1200)
    assert record.resumed == 1
    same_bits(here / "whole", here / "half")
    journals = [
        [(step.samples, step.loss) for step in RunFolder(here / name).steps()] for name in ("whole", "half")
    ]
    assert journals[0] == journals[1]


@pytest.fixture
def _briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "BRIEFLY", 0.01)
    monkeypatch.setattr(autotune, "ROUNDS", 1)


@pytest.mark.usefixtures("_briefly")
def test_the_number_of_micro_batches_is_found_once(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Written down, kept when the run goes on, and a finished cell of a study is not run again."""
    (here / "study.toml").write_text(
        "keep_models = true\n[[grid]]\ntask = 'digits-mlp'\nbatch = 20\nsamples = 100\n"
        "strategy = 'pipeline'\nworkers = 2\nthreads = 1\ntimed = false\n"
    )
    study = study_file.read(here / "study.toml")
    [record] = execute(study, here / "results", NoView()).records
    folder = Path(record.run)
    chosen = RunFolder(folder).spec().strategy_options["micro_batches"]
    assert chosen in (1, 2)  # four would have five samples each: too small to be fast
    assert record.spec.micro_batches == chosen

    def never(*_: Any) -> RunSpec:
        raise AssertionError("it was measured again")

    monkeypatch.setattr(autotune, "with_micro_batches", never)
    stamp = (folder / "result.json").stat().st_mtime_ns
    [again] = execute(study, here / "results", NoView()).records
    assert again == record
    assert (folder / "result.json").stat().st_mtime_ns == stamp
    longer = resume(folder, samples=200)
    assert (longer.spec.micro_batches, longer.resumed) == (chosen, 1)
    assert longer.samples > record.samples


@pytest.mark.usefixtures("_briefly")
def test_what_was_tried_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest is taken; with ranks that are there for the run only, nothing is measured."""
    asked = []

    def launch(_: Any, function: Any, ranks: int, specs: list[RunSpec], *__: Any) -> list[list[float]]:
        asked.append((function.__name__, ranks, [spec.micro_batches for spec in specs]))
        return [[1000.0, 3000.0, 2000.0]]

    monkeypatch.setattr(LocalLauncher, "launch", launch)
    settings = fill_in({"strategy": "pipeline", "workers": 4, "strategy_options": {"stages": 2}})
    spec = RunSpec.of(task="digits-mlp", batch=64, **settings)
    said: list[str] = []
    assert autotune.with_micro_batches(spec, "images", said.append).micro_batches == 2
    assert asked == [("measure_each", 4, [1, 2, 4])]  # eight would have four samples of a replica's 32
    elsewhere = autotune.with_micro_batches(spec.replace(launcher="env", batch=999), "images", said.append)
    assert elsewhere.micro_batches == 8
    assert said == [
        "micro-batches 1: 1,000 images/s, 2: 3,000 images/s, 4: 2,000 images/s: taking 2",
        "8 micro-batches per batch; choose another number with --micro-batches",
    ]


@pytest.fixture
def _double(monkeypatch: pytest.MonkeyPatch) -> None:
    """One precision is enough for a test."""
    monkeypatch.setattr(verify_, "TOLERANCES", {"float64": 1e-10})


def compared(task: str, steps: int = 2, **settings: Any) -> verify_.Verification:
    spec = RunSpec.of(task=task, threads=1, **{"batch": 65, **fill_in(settings)})
    return verify_.compare(spec, steps, lambda text: None)


@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        ({"strategy": "pipeline", "workers": 2}, "single"),
        ({"strategy": "layers", "workers": 2, "transport": "torch"}, "single"),
        (
            {"strategy": "pipeline", "workers": 4, "strategy_options": {"stages": 2, "recompute": True}},
            "single",
        ),
    ],
    ids=["pipeline", "layers on torch", "two pipelines"],
)
@pytest.mark.usefixtures("_double")
def test_verified(settings: dict[str, Any], reference: str) -> None:
    found = compared("digits-mlp", **settings)
    assert found.exact
    assert [comparison.reference for comparison in found.comparisons] == [reference]
    assert found.comparisons[0].largest < 1e-12
    if settings["strategy"] == "pipeline":
        assert found.spec.micro_batches == 4  # not one, which would leave out what is hard


def test_verified_with_batch_norm(here: Path) -> None:
    """One pipeline takes its micro-batches one by one, as one worker does: statistics are comparable too."""
    (here / "tasks.py").write_text(TASKS)
    found = compared("tasks.py:images", batch=64, strategy="pipeline", workers=2)
    assert found.exact
    assert found.comparisons[0].reference == "single in 4 shares"
    assert any("running_var" in name for name in found.comparisons[1].tensors)
    assert found.reasons == [
        "2 batch norms look at one micro-batch at a time, so one worker with the whole batch computes "
        "something else; the reference takes the same 4 parts one by one"
    ]


def test_verified_with_batch_norm_in_two_pipelines(here: Path) -> None:
    (here / "tasks.py").write_text(TASKS)
    settings = {"strategy": "pipeline", "workers": 4, "strategy_options": {"stages": 2, "micro_batches": 2}}
    found = compared("tasks.py:images", batch=64, **settings)
    assert found.exact
    assert found.comparisons[0].reference == "single in 4 shares"
    assert found.reasons[0].endswith("the same 4 parts one by one, and running statistics are left out")
    with pytest.raises(UsageError) as caught:
        compared("tasks.py:images", batch=66, **settings)
    assert str(caught.value) == (
        "verify compares batch norm with one worker that takes the same 4 parts of a batch, and 66 samples "
        "are divided unevenly: use a batch that 4 divides"
    )


@pytest.mark.usefixtures("_double")
def test_a_ragged_last_batch_is_divided_unevenly_too(here: Path) -> None:
    """300 samples are 4 batches of 64 and one of 44, whose eight parts are not those of one worker."""
    (here / "tasks.py").write_text(TASKS)
    settings = {"strategy": "pipeline", "workers": 4, "strategy_options": {"stages": 2, "micro_batches": 4}}
    with pytest.raises(UsageError, match=r"44 samples are divided unevenly"):
        compared("tasks.py:images", batch=64, steps=5, **settings)


def test_a_run_that_goes_on_keeps_its_cut(here: Path) -> None:
    """Another cut would draw dropout from other generators; kept in the folder, so also after kill -9."""
    (here / "own.py").write_text(TASKS)
    record = train(here / "run", "own.py:noisy", epochs=2, samples=300, **PIPELINE)
    chosen = RunFolder(here / "run").choices()
    assert chosen["stages"] == record.choices["stages"]
    other = 2 if chosen["stages"][1]["first"] != 2 else 5
    chosen["stages"][1]["first"] = other
    RunFolder(here / "run").write_choices(chosen)
    again = resume(here / "run", samples=600)
    assert again.choices["stages"][1]["first"] == other
    assert RunFolder(here / "run").choices() == again.choices


def test_frozen_norms_stay_frozen_when_evaluated(here: Path) -> None:
    """A task may put a part of its model into `eval` for good."""
    (here / "own.py").write_text(
        TASKS
        + """
def frozen() -> mh.Task:
    def model():
        network = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 2))
        network[1].eval()
        return network
    return made(model)
"""
    )
    train(here / "run", "own.py:frozen", epochs=2)
    assert model(here / "run")["1.num_batches_tracked"] == 0
