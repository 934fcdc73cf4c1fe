"""Callbacks that stop a run, early stopping, the best model, and weights to start from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy

import manyhands as mh
from conftest import Answer
from manyhands.core.errors import UsageError
from manyhands.records.record import StepRecord

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
SCORES = [0.1, 0.5, 0.4, 0.5, 0.3, 0.9, 0.2, 0.2, 0.2, 0.2]  # of the evaluations, one per epoch
SETTINGS: dict[str, Any] = {"batch": 32, "recipe": "constant", "lr": 0.1, "quiet": True, "epochs": 10}


def scripted() -> mh.Task:
    """Its metric follows a script; one evaluation is one call, after that of the examination."""
    calls: list[int] = []

    def scores(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if len(targets) == 64:
            calls.append(1)
        return torch.full((len(targets),), SCORES[min(len(calls), len(SCORES)) - 1])

    return mh.Task(
        name="scripted",
        model=lambda: nn.Linear(4, 2),
        train=(X, Y),
        test=(X, Y),
        loss=cross_entropy,
        target=2.0,
        metric=mh.Metric(name="script", scores=scores),
    )


@pytest.mark.parametrize(("patience", "epochs"), [(1, 3), (2, 4), (3, 5), (4, 10), (None, 10)])
def test_patience_counts_evaluations_that_are_no_better(
    patience: int | None, epochs: int, tmp_path: Path
) -> None:
    """As good is not better: with a patience of 3 it ends at 0.3, after 0.5, 0.4 and 0.5."""
    run = mh.train(scripted(), patience=patience, out=tmp_path / "run", **SETTINGS)
    assert run.epochs == epochs
    assert run.status == "finished"
    early = patience is not None
    ends = f"ended early: {patience} evaluation{'s' * (patience != 1)} without a better script"
    assert run.message == (ends if early else None)


def test_patience_survives_an_interruption(tmp_path: Path) -> None:
    settings = {**SETTINGS, "patience": 3}
    mh.train("digits-mlp", out=tmp_path / "whole", **settings | {"lr": 1e-9, "batch": 512})
    mh.train("digits-mlp", out=tmp_path / "part", samples=2 * 1437, **settings | {"lr": 1e-9, "batch": 512})
    again = mh.train(
        "digits-mlp",
        out=tmp_path / "part",
        resume=True,
        allow_changes=True,
        **settings | {"lr": 1e-9, "batch": 512},
    )
    whole = mh.load(tmp_path / "whole")
    assert isinstance(whole, mh.RunRecord)
    assert (again.steps, again.message) == (whole.steps, whole.message)
    assert whole.epochs == 4


@pytest.mark.parametrize("settings", [{}, {"strategy": "hogwild"}, {"strategy": "sharded", "workers": 2}])
def test_the_best_model_is_kept(settings: dict[str, Any], tmp_path: Path) -> None:
    """Learning rates that destroy what was learned: the best is not the last."""

    def task() -> mh.Task:
        return mh.Task(
            name="best",
            model=lambda: nn.Linear(4, 2),
            train=(X, Y),
            test=(X, Y),
            loss=cross_entropy,
            target=2.0,
        )

    more = {"batch": 8, "recipe": "constant", "lr": 30.0, "quiet": True, "epochs": 12, "seed": 3}
    run = mh.train(task, keep_best=True, out=tmp_path / "run", **more | settings)
    assert run.best_metric is not None
    assert run.metric is not None
    model = run.model(best=True)
    assert float((model(X).argmax(1) == Y).float().mean()) == pytest.approx(run.best_metric)
    assert float((run.model()(X).argmax(1) == Y).float().mean()) == pytest.approx(run.metric)
    assert max(point.metric or 0 for point in run.curve) == run.best_metric


def test_without_keeping_it_the_best_is_a_sentence(tmp_path: Path) -> None:
    run = mh.train("quadratic", epochs=1, out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "best.safetensors").exists()
    with pytest.raises(UsageError, match=r"has no best.safetensors: train with keep_best=True"):
        run.state_dict(best=True)


class Listens(mh.Callback):
    def __init__(self, stops: bool = False) -> None:
        self.heard: list[str] = []
        self.stops = stops

    def on_start(self, start: Any) -> None:
        self.heard.append("start")

    def on_step(self, step: StepRecord) -> None:
        self.heard.append("step")

    def on_evaluation(self, step: StepRecord) -> Any:
        assert step.metric is not None
        self.heard.append("evaluation")
        return "stop" if self.stops else None

    def on_end(self, record: mh.RunRecord) -> None:
        self.heard.append("end")


def test_a_callback_hears_everything_in_order(tmp_path: Path) -> None:
    listens = Listens()
    mh.train("quadratic", epochs=1, batch=100, out=tmp_path / "run", quiet=True, callbacks=[listens])
    assert listens.heard[0] == "start"
    assert listens.heard[-2:] == ["evaluation", "end"]
    assert listens.heard.count("step") == len(listens.heard) - 3


@pytest.mark.parametrize("settings", [{}, {"workers": 2}, {"workers": 2, "strategy": "server"}])
def test_a_callback_can_stop_the_run(settings: dict[str, Any], tmp_path: Path) -> None:
    listens = Listens(stops=True)
    run = mh.train(
        "quadratic", epochs=100_000, out=tmp_path / "run", quiet=True, callbacks=[listens], **settings
    )
    assert run.status == "finished"
    assert run.epochs < 100_000
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert listens.heard[-1] == "end"


def test_a_function_is_a_callback_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    heard = threading.Event()
    caplog.set_level("INFO")

    def three(step: StepRecord) -> str | None:
        heard.set()
        return "stop" if step.step >= 3 else None

    run = mh.train("quadratic", epochs=100_000, out=tmp_path / "run", quiet=True, callbacks=[three])
    assert heard.is_set()
    assert run.status == "finished"
    assert "three asks to stop: the run ends after the current step" in caplog.text


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            Listens,
            "a callback is an mh.Callback or a function of a step, not the class Listens: use Listens()",
        ),
        (3, "a callback is an mh.Callback or a function of a step, not an int"),
    ],
)
def test_what_is_no_callback(given: Any, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        mh.train("quadratic", callbacks=[given], quiet=True)
    assert str(caught.value) == sentence


class TestInit:
    @pytest.fixture
    def weights(self, tmp_path: Path) -> dict[str, torch.Tensor]:
        run = mh.train("digits-mlp", epochs=1, out=tmp_path / "first", quiet=True)
        return run.state_dict()

    @pytest.mark.parametrize(("kind", "workers"), [("safetensors", 2), ("pt", 1), ("wrapped", 1), ("ddp", 1)])
    def test_a_run_starts_from_given_weights(
        self, kind: str, workers: int, weights: dict[str, torch.Tensor], tmp_path: Path
    ) -> None:
        file = tmp_path / f"start.{'safetensors' if kind == 'safetensors' else 'pt'}"
        if kind == "safetensors":
            save_file(weights, file)
        else:
            of_ddp = {"model": {f"module.{name}": tensor for name, tensor in weights.items()}, "epoch": 3}
            torch.save({"wrapped": {"state_dict": weights}, "ddp": of_ddp}.get(kind, weights), file)
        settings: dict[str, Any] = {"workers": workers, "lr": 1e-30, "epochs": 1, "quiet": True}
        run = mh.train("digits-mlp", init=str(file), out=tmp_path / "run", **settings)
        found = load_file(run.folder / "model.safetensors")
        assert all(torch.allclose(found[name], tensor, atol=1e-6) for name, tensor in weights.items())

    def test_what_does_not_fit_is_a_sentence(
        self, weights: dict[str, torch.Tensor], tmp_path: Path, typed: Callable[..., Answer]
    ) -> None:
        def answer(name: str) -> str:
            found = typed("train", "digits-mlp", "-q", "--init", name, "--out", "never", cwd=tmp_path)
            assert found.code == 2
            assert not (tmp_path / "never").exists()
            return found.err

        assert answer("none.pt") == "error: there is no file none.pt to start from (--init)\n"
        (tmp_path / "text.pt").write_text("hello")
        assert answer("text.pt").startswith("error: text.pt is neither safetensors nor a state dict that")
        torch.save([1, 2], tmp_path / "list.pt")
        assert answer("list.pt") == "error: list.pt holds a list, not a state dict of tensors (--init)\n"
        torch.save(print, tmp_path / "code.pt")
        assert answer("code.pt").startswith("error: code.pt is neither safetensors nor a state dict that")
        first, *rest = weights
        save_file({name: weights[name] for name in rest}, tmp_path / "less.safetensors")
        sentence = f"error: less.safetensors is of another model (--init): it lacks {first}\n"
        assert answer("less.safetensors") == sentence
        save_file({**weights, first: torch.zeros(2), "more": torch.zeros(1)}, tmp_path / "odd.safetensors")
        assert answer("odd.safetensors").startswith(
            f"error: odd.safetensors is of another model (--init): it also has more, and has {first} (2,) "
        )
