"""Folders, resuming, budgets, targets and divergence: a run from its outside."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import manyhands as mh
from manyhands.callbacks.journal import Journal
from manyhands.core.errors import CheckpointError, DivergedError, UsageError
from manyhands.records.record import StepRecord
from manyhands.records.run_folder import RunFolder
from manyhands.records.spec import RunSpec
from manyhands.runs.train import run


def train(task: str = "quadratic", **settings: object) -> mh.RunRecord:
    return mh.train(task, **{"quiet": True, "threads": 1, **settings})  # type: ignore[arg-type]


def test_a_run_leaves_everything_that_is_promised(here: Path) -> None:
    record = train(epochs=2)
    folder = here / record.run
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")) == [
        "checkpoints",
        "environment.json",
        "model.safetensors",
        "result.json",
        "spec.json",
        "spec.sig",
        "steps.jsonl",
    ]
    assert folder.name == f"quadratic-{record.id}"
    assert mh.load(folder) == record
    assert RunFolder(folder).spec() == record.spec
    assert record.environment.torch == torch.__version__
    assert record.environment.threads == 1
    steps = RunFolder(folder).steps()
    assert [step.step for step in steps] == list(range(1, 21))
    assert steps[-1].samples == record.samples == 2000
    assert steps[-1].metric == record.metric
    assert [step.epoch for step in steps] == [0] * 10 + [1] * 10


def test_the_phases_add_up_to_the_wall_clock(here: Path) -> None:
    record = train(epochs=5)
    (phases,) = record.phases
    assert sum(phases.values()) == pytest.approx(record.seconds)
    aside = phases["evaluation"] + phases["checkpoint"]
    assert record.training_seconds == pytest.approx(record.seconds - aside)
    assert record.samples_per_second == pytest.approx(record.samples / record.training_seconds)
    for name in ("data", "forward", "backward", "optimizer", "evaluation", "checkpoint"):
        assert phases[name] > 0, name
    steps = RunFolder(Path(record.run)).steps()
    assert sum(step.phases["forward"] for step in steps) == pytest.approx(phases["forward"], rel=1e-3)


def test_running_the_same_again_takes_a_new_folder(here: Path) -> None:
    first, second = train(epochs=1), train(epochs=1)
    assert second.run == f"{first.run}-2"
    assert second.id == first.id
    assert second.metric == first.metric
    models = [(here / record.run / "model.safetensors").read_bytes() for record in (first, second)]
    assert models[0] == models[1], "to the last byte"


def test_what_the_task_decides_is_written_down(here: Path) -> None:
    record = train("digits-mlp")
    assert (record.spec.batch, record.spec.epochs, record.spec.recipe) == (64, 20, "large-batch")
    assert record.spec.target == 0.96
    assert record.recipe["lr"] == 0.4
    assert record.recipe_line.startswith("sgd · lr 0.4 per 256 samples = 0.1 at batch 64, cosine decay")
    assert train("digits-mlp", batch=64, epochs=20).id == record.id


def test_a_tasks_rate_is_only_for_the_optimizer_it_was_found_with(here: Path) -> None:
    adam = train("digits-mlp", epochs=1, recipe_options={"optimizer": "adam"})
    assert (adam.recipe["lr"], adam.recipe["decay"]) == (0.001, "cosine")


def test_text_and_numbers_make_the_same_spec(here: Path) -> None:
    """`--set n=500 --set recipe.lr=0.1` is options={"n": 500}, lr=0.1."""
    text = train(epochs=1, options={"n": "500"}, recipe_options={"lr": "0.1"})
    numbers = train(epochs=1, options={"n": 500}, lr=0.1)
    assert text.id == numbers.id
    assert text.spec.options == {"n": 500}


def test_an_edited_task_file_is_read_again(here: Path) -> None:
    """In a notebook one edits and trains again in one process."""
    source = (Path(__file__).parents[2] / "examples/spirals.py").read_text()
    (here / "mine.py").write_text(source)
    assert train("mine.py:spirals", epochs=1).train_samples == 4000
    (here / "mine.py").write_text(source.replace("n: int = 4000", "n: int = 5000"))
    assert train("mine.py:spirals", epochs=1).train_samples == 5000


def test_schedules_are_functions_of_samples(here: Path) -> None:
    """Law 2: batch 50 and batch 100 have the same rate where they have seen the same samples."""
    rates = []
    for batch in (50, 100):
        record = train("digits-mlp", batch=batch, epochs=2, recipe_options={"scaling": "none"})
        rates.append({step.samples: step.lr for step in RunFolder(Path(record.run)).steps()})
    fine, coarse = rates
    # the rate of a step is that of the samples before it: line up by where the step begins
    starts = {after - size: lr for (after, lr), size in zip(coarse.items(), _sizes(coarse), strict=True)}
    begins = {after - size: lr for (after, lr), size in zip(fine.items(), _sizes(fine), strict=True)}
    common = starts.keys() & begins.keys()
    assert len(common) > 10
    assert all(starts[samples] == begins[samples] for samples in common)


def _sizes(by_samples: dict[int, float]) -> list[int]:
    seen = [0, *by_samples]
    return [after - before for before, after in pairwise(seen)]


@pytest.mark.parametrize(
    ("budget", "samples"), [({"epochs": 0.25}, 300), ({"samples": 450}, 500), ({"epochs": 1}, 1000)]
)
def test_budgets_end_a_run_with_the_step_that_spends_them(
    here: Path, budget: dict[str, float], samples: int
) -> None:
    assert train(batch=100, **budget).samples == samples


def test_a_budget_of_seconds_ends_a_run(here: Path) -> None:
    record = train(epochs=100000, seconds=0.2)
    assert record.status == "finished"
    assert 0.2 <= record.training_seconds < 60
    assert record.metric is not None


def test_the_target_can_stop_a_run(here: Path) -> None:
    record = train(epochs=50, stop_at_target=True, evaluate_every=0.5)
    assert record.status == "target"
    assert record.samples == record.target_samples < 50_000
    assert record.metric is not None
    assert record.metric <= record.target
    longer = train(epochs=20, evaluate_every=0.5)
    assert longer.status == "finished"
    assert (longer.target_samples, longer.samples) == (record.target_samples, 20_000)


def test_evaluations_come_at_milestones_of_samples(here: Path) -> None:
    """Also where a batch does not divide the interval, and always at the end."""
    record = train(batch=300, epochs=2, evaluate_every=0.5, options={"n": 1000})
    evaluated = [step.samples for step in RunFolder(Path(record.run)).steps() if step.metric is not None]
    assert evaluated == [600, 1000, 1600, 2000]


def test_a_loss_that_is_no_number_stops_with_step_and_rate(here: Path) -> None:
    with pytest.raises(DivergedError) as caught:
        train(lr=1e30, epochs=2, out=here / "run")
    assert str(caught.value).startswith(
        "the loss became inf at step 2 (200 samples seen), with learning rate 1e+30;"
    )
    record = mh.load(here / "run")
    assert (record.status, record.steps, record.loss) == ("diverged", 2, None)
    assert record.message == str(caught.value)
    assert [step.step for step in RunFolder(here / "run").steps()] == [1]


class TestResume:
    def test_half_and_half_is_the_whole(self, here: Path) -> None:
        whole = train("digits-mlp", epochs=4, out=here / "whole")
        train("digits-mlp", epochs=4, samples=2000, out=here / "half")
        half = train("digits-mlp", epochs=4, out=here / "half", resume=True, allow_changes=True)
        assert half.metric == whole.metric
        assert half.resumed == 1
        for name, tensor in load_file(here / "whole/model.safetensors").items():
            assert torch.equal(load_file(here / "half/model.safetensors")[name], tensor), name

    def test_a_changed_spec_is_refused_by_what_changed(self, here: Path) -> None:
        train(epochs=1, batch=100, out=here / "run")
        with pytest.raises(UsageError) as caught:
            train(epochs=2, batch=50, out=here / "run", resume=True)
        assert str(caught.value) == (
            f"{here / 'run'} was started with other settings (batch 100 -> 50; epochs 1 -> 2); "
            "continue anyway with --allow-changes"
        )
        assert mh.load(here / "run").spec.batch == 100

    def test_a_folder_keeps_its_settings(self, here: Path) -> None:
        train(epochs=2, batch=50, seed=4, samples=1000, options={"n": 800}, out=here / "run")
        record = train(str(here / "run"), resume=True, samples=1600, allow_changes=True)
        assert (record.spec.batch, record.spec.seed, record.samples) == (50, 4, 1600)
        with pytest.raises(UsageError, match=r"\(option n 800 -> 900\)"):
            train(str(here / "run"), resume=True, options={"n": 900})

    def test_a_second_change_goes_on_from_the_first(self, here: Path) -> None:
        for samples in (400, 800, 1200):
            record = train(samples=samples, epochs=5, out=here / "run", resume=True, allow_changes=True)
        assert (record.samples, record.resumed) == (1200, 2)
        assert [step.step for step in RunFolder(here / "run").steps()] == list(range(1, 13))

    def test_a_finished_run_is_not_run_again(self, here: Path) -> None:
        first = train(epochs=1, out=here / "run")
        assert train(epochs=1, out=here / "run", resume=True) == first

    def test_without_a_folder_the_newest_of_that_spec_is_meant(self, here: Path) -> None:
        train(epochs=1)
        second = train(epochs=1)
        assert train(epochs=1, resume=True).run == second.run

    def test_where_there_is_nothing_it_begins(self, here: Path) -> None:
        assert train(epochs=1, resume=True, out=here / "new").resumed == 0

    def test_a_longer_run_that_was_killed_is_not_taken_for_the_shorter(self, here: Path) -> None:
        """It once was: the result of the shorter run still stood there, and said finished."""
        train(epochs=1, out=here / "run")

        def cut(self: Journal, step: StepRecord) -> None:
            if step.step == 15:
                raise RuntimeError("killed")

        longer = RunSpec.of(task="quadratic", epochs=2, threads=1, checkpoint_every=0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Journal, "on_step", cut)
            with pytest.raises(RuntimeError, match="killed"):
                run(longer, out=here / "run", resume=True, allow_changes=True)
        assert train(str(here / "run"), resume=True).steps == 20

    def test_another_optimizer_begins_without_memory(
        self, here: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        train("digits-mlp", samples=1000, out=here / "run")
        options = {"optimizer": "adamw"}
        changed = {"recipe_options": options, "samples": 2000, "allow_changes": True, "quiet": False}
        assert train(str(here / "run"), resume=True, **changed).samples >= 2000
        assert "the optimizer was sgd and is adamw: it starts without state\n" in capsys.readouterr().err

    def test_another_model_is_refused_and_nothing_is_changed(self, here: Path) -> None:
        before = train("digits-mlp", epochs=1, out=here / "run")
        with pytest.raises(CheckpointError, match=r"^the checkpoint is of another model: model/1.weight is "):
            train(str(here / "run"), resume=True, options={"width": 8}, allow_changes=True)
        assert mh.load(here / "run") == before
        assert RunFolder(here / "run").spec() == before.spec

    def test_a_folder_that_holds_no_run(self, here: Path) -> None:
        with pytest.raises(
            UsageError, match=r"^runs/none is not a run folder \(spec.json: no such file or directory\)$"
        ):
            train("runs/none", resume=True)

    def test_other_settings_are_another_run_and_that_is_said(
        self, here: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Else one waits for a run to go on while a new one begins."""
        first = train(epochs=1)
        other = train(epochs=2, resume=True, quiet=False)
        assert other.run != first.run
        said = f"runs has no run with exactly these settings to resume: starting {other.run}\n"
        assert capsys.readouterr().err.startswith(said)

    def test_how_often_it_is_saved_may_change(self, here: Path) -> None:
        first = train(epochs=1, out=here / "run")
        assert train(epochs=1, out=here / "run", resume=True, checkpoint_every=5).id == first.id


class TestFolder:
    def test_a_torn_last_line_is_no_step(self, here: Path) -> None:
        record = train(epochs=1)
        path = here / record.run / "steps.jsonl"
        path.write_text(path.read_text()[:-20])
        assert len(RunFolder(here / record.run).steps()) == 9

    @pytest.mark.parametrize("damage", [b"\0" * 500, b"\xff\xfe\n", b"{}\n", b'{"step": 1, "epo'])
    def test_what_a_power_cut_left_is_no_step(self, here: Path, damage: bytes) -> None:
        record = train(epochs=1)
        path = here / record.run / "steps.jsonl"
        path.write_bytes(path.read_bytes() + damage + b"\nnever reached\n")
        assert len(RunFolder(here / record.run).steps()) == 10

    def test_only_one_process_may_train_there(self, here: Path) -> None:
        folder = RunFolder(here / "run")
        with (
            folder.locked(),
            pytest.raises(UsageError, match=r"run is being trained by another process \(pid \d+\)$"),
        ):
            train(out=here / "run")

    def test_a_run_without_result_says_how_to_continue(self, here: Path) -> None:
        RunFolder(here / "run").create()
        RunFolder(here / "run").write_spec(RunSpec.of(task="quadratic"))
        with pytest.raises(
            UsageError, match=r"^run has no result yet; continue it with: manyhands train --resume run$"
        ):
            mh.load("run")

    def test_step_records_are_json_whatever_the_numbers(self) -> None:
        step = StepRecord(1, 0, 10, 0.5, 0.1, 1.0, {}, 0.1, math.inf)
        assert json.loads(step.to_json(), parse_constant=pytest.fail)["test_loss"] is None

    def test_step_records_round_trip(self) -> None:
        step = StepRecord(3, 1, 300, 0.25, 0.1, 1.5, {"data": 0.25}, 0.9, 0.3)
        assert StepRecord.from_json(step.to_json()) == step
        plain = StepRecord(3, 1, 300, 0.25, 0.1, 1.5)
        assert json.loads(plain.to_json()).keys() == {
            "step",
            "epoch",
            "samples",
            "loss",
            "lr",
            "seconds",
            "phases",
        }
        assert StepRecord.from_json(plain.to_json()) == plain


def test_the_metric_is_a_mean_over_the_whole_test_set(here: Path) -> None:
    """Evaluated in chunks that do not divide it, against all at once."""
    record = train("digits-mlp", epochs=1, dtype="float64")
    from manyhands.tasks import find

    task = find.build("digits-mlp", {})
    model = task.model().double()
    model.load_state_dict(load_file(here / record.run / "model.safetensors"))
    (batch,) = task.test.stream([next(iter(_all(len(task.test))))], 0)
    outputs = model(task.preprocess.double()(batch.inputs))
    assert record.metric == (outputs.argmax(1) == batch.targets).double().mean().item()
    last = RunFolder(here / record.run).steps()[-1]
    assert last.test_loss is not None
    assert math.isclose(last.test_loss, task.loss(outputs, batch.targets).item(), rel_tol=1e-12)


def _all(n: int) -> list[object]:
    from manyhands.data.order import in_order

    return list(in_order(n, n))
