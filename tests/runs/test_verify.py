"""`manyhands verify`: what it says of a strategy that is exact, of one that is not, and of what cannot be."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Answer
from manyhands import cli
from manyhands.core.errors import InterruptedRunError
from manyhands.records.spec import RunSpec
from manyhands.runs import verify

pytestmark = pytest.mark.usefixtures("one_core")
BATCH_NORM = """
import torch, manyhands as mh
from torch import nn

def normed() -> mh.Task:
    inputs = torch.randn(300, 6, generator=torch.Generator().manual_seed(0))
    data = mh.ArrayData(inputs, (inputs.sum(1) > 0).long())
    model = lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    loss = nn.functional.cross_entropy
    return mh.Task(name="normed", model=model, train=data, test=data, loss=loss, target=1.0)
"""


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = cli.answer(["verify", *words])
    return code, capsys.readouterr().out


def test_an_exact_strategy(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = answer(capsys, "digits-mlp", "--workers", "3")
    assert code == 0
    assert out.splitlines()[-1] == "allreduce with 3 workers on shm equals single after 5 steps of 65 samples"
    code, out = answer(capsys, "digits-mlp", "--workers", "2", "--transport", "torch", "--json")
    found = json.loads(out)
    assert (code, found["exact"], found["transport"]) == (0, True, "torch")
    float32, float64 = found["comparisons"]
    assert float32["largest"] < 1e-5
    assert float64["largest"] < 1e-12
    assert "optimizer/momentum_buffer/1.weight" in float64["tensors"]


def test_a_difference_above_the_tolerance(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "TOLERANCES", {"float32": 1e-30})
    code, out = answer(capsys, "digits-mlp", "--workers", "3")
    assert code == 1
    assert "DIFFERS FROM single" in out


def test_float64_decides_and_float32_is_called_rounding(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A public residual network with few samples per batch norm was called different: it rounds a lot."""
    monkeypatch.setattr(verify, "TOLERANCES", {"float32": 1e-30, "float64": 1e-10})
    code, out = answer(capsys, "digits-mlp", "--workers", "2")
    assert code == 0
    assert "equals single" in out
    assert re.search(r"note: float32: rounding; \S+ is more than usual, but float64 differs by \S+ only", out)
    monkeypatch.setattr(verify, "TOLERANCES", {"float32": 1e-4, "float64": 1e-30})
    code, out = answer(capsys, "digits-mlp", "--workers", "2")
    assert (code, "DIFFERS FROM single" in out, "rounding" in out) == (1, True, False)


def test_a_wrong_strategy_is_caught(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker whose gradient is off by a hundredth part, which no accuracy would show."""
    from manyhands.strategies.base import Compute

    right = Compute.forward
    monkeypatch.setattr(
        Compute, "forward", lambda self, model, batch, weight: right(self, model, batch, weight) * 1.01
    )
    # the workers are forked from a server that has the right one; the reference here has the wrong one
    code, out = answer(capsys, "digits-mlp", "--workers", "2")
    assert code == 1
    assert "DIFFERS FROM" in out


def test_what_cannot_be_equal_is_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "task.py").write_text(BATCH_NORM)
    code, out = answer(capsys, "task.py:normed", "--workers", "3", "--json")
    found = json.loads(out)
    assert (code, found["exact"]) == (0, True)
    assert found["comparisons"][0]["reference"] == "single in 3 shares"
    assert found["reasons"][0].startswith("1 batch norm looks at each worker's own share")
    assert found["reasons"][1].startswith("1 dropout was switched off")
    assert not any("running" in name for name in found["comparisons"][0]["tensors"])
    code, out = answer(capsys, "task.py:normed", "--workers", "3", "--sync-batchnorm", "--json")
    found = json.loads(out)
    assert (code, found["exact"], found["comparisons"][0]["reference"]) == (0, True, "single")
    assert any("running_var" in name for name in found["comparisons"][0]["tensors"])


@pytest.mark.parametrize("strategy", ["hogwild", "server"])
def test_what_is_never_the_same_is_not_verified(strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.answer(["verify", "digits-mlp", "--strategy", strategy]) == 2
    assert capsys.readouterr().err == (
        f"error: strategy {strategy} is not single: its workers go at their own pace, and no two runs are "
        "alike; verify compares strategies that step together (allreduce, average with every 1)\n"
    )


def test_an_average_a_step_and_a_batch_norm(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Averaged copies have averaged statistics, as the sums of `allreduce` have."""
    (here / "task.py").write_text(BATCH_NORM)
    words = ["--strategy", "average", "--set", "strategy.every=1", "--workers", "2", "--json"]
    code, out = answer(capsys, "task.py:normed", *words)
    found = json.loads(out)
    assert (code, found["exact"], found["comparisons"][0]["reference"]) == (0, True, "single in 2 shares")


NUMBERED = """
import itertools, torch, manyhands as mh
from torch import nn

numbers = itertools.count(9)  # as Keras does: `dense`, `dense_1`, ... whatever was built before
weights = torch.tensor([1.0, 2.0])

def task(model, loss=nn.functional.cross_entropy) -> mh.Task:
    inputs = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    data = mh.ArrayData(inputs, (inputs.sum(1) > 0).long())
    return mh.Task(name="t", model=model, train=data, test=data, loss=loss, target=1.0)

def numbered() -> mh.Task:
    def model():
        made = nn.Sequential()
        for layer in (nn.Linear(6, 6), nn.Linear(6, 2), nn.BatchNorm1d(2, momentum=0.5)):
            made.add_module(f"dense_{next(numbers)}", layer)
        return made
    return task(model)

def different() -> mh.Task:
    more = [nn.Identity(), nn.Linear(9, 9)]
    return task(lambda: nn.Sequential(nn.Linear(6, 9), *more[: next(numbers) - 9], nn.Linear(9, 2)))

def weighted() -> mh.Task:
    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, weights, reduction="none").mean()
    return task(lambda: nn.Linear(6, 2), loss)

def module() -> mh.Task:
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.tensor([1.0, 2.0]))
        def forward(self, outputs, targets):
            return nn.functional.cross_entropy(outputs, targets, self.scale, reduction="none").mean()
    return task(lambda: nn.Linear(6, 2), Loss())
"""


def test_tensors_whose_names_are_numbered_are_compared_in_their_order(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was an AssertionError that listed all names."""
    (here / "task.py").write_text(NUMBERED)
    words = [
        "task.py:numbered",
        "--workers",
        "1",
        "--batch",
        "10",
        "--accumulate",
        "2",
        "--set",
        "recipe.momentum=0.9",
    ]
    code, out = answer(capsys, *words, "--json")
    found = json.loads(out)
    assert (code, found["exact"]) == (0, True)
    assert (
        "each build of the model gives its tensors new numbers: they are compared in their order"
        in found["reasons"]
    )
    assert len(found["comparisons"]) == 2
    assert any(
        name.startswith("optimizer/momentum_buffer/dense_") for name in found["comparisons"][0]["tensors"]
    )


def test_models_of_other_shapes_are_a_sentence(here: Path, typed: Callable[..., Answer]) -> None:
    (here / "task.py").write_text(NUMBERED)
    found = typed("verify", "task.py:different", "--workers", "1", "--batch", "10", cwd=here)
    assert found.code == 1
    assert "error: two builds of the model differ, not only in names: " in found.err


@pytest.mark.parametrize("workers", ["1", "2"])
def test_float32_numbers_in_a_loss_leave_out_float64_and_say_so(
    workers: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was torch's "expected scalar type Double but found Float", which does not say of what."""
    (here / "task.py").write_text(NUMBERED)
    code, out = answer(capsys, "task.py:weighted", "--workers", workers, "--batch", "10", "--json")
    found = json.loads(out)
    assert (code, found["exact"], [each["dtype"] for each in found["comparisons"]]) == (0, True, ["float32"])
    [reason] = found["reasons"]
    assert reason.startswith(
        "float64 is left out: the task holds float32 numbers that do not change their type"
    )
    assert "Double" in reason


def test_a_loss_that_is_a_module_changes_its_type_with_the_model(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "task.py").write_text(NUMBERED)
    code, out = answer(capsys, "task.py:module", "--workers", "1", "--batch", "10", "--json")
    found = json.loads(out)
    assert (code, [each["dtype"] for each in found["comparisons"]]) == (0, ["float32", "float64"])


def test_ctrl_c_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came while steps were made, and the comparison went on as if nothing had happened."""

    class Interrupted:
        def launch(self, *_: object, **__: object) -> list[None]:
            signal.raise_signal(signal.SIGINT)
            return [None]

    monkeypatch.setattr(verify.registry, "member", lambda *_: Interrupted)
    with pytest.raises(InterruptedRunError, match="interrupted by SIGINT while steps were compared"):
        verify._probe(RunSpec.of(task="digits-mlp"), 3)


RANDOM = """
import torch, manyhands as mh
from torch import nn
from torch.nn import functional

x = torch.randn(40, 4, 8, generator=torch.Generator().manual_seed(0))

class Net(nn.Module):
    def __init__(self, noise):
        super().__init__()
        self.noise = noise
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = self.recurrent(x)[0]
        x = self.layer(self.attention(x, x, x, need_weights=False)[0])
        x = functional.dropout(x, 0.4, self.training)
        if self.noise:
            x = x + torch.randn_like(x)
        return self.head(x.mean(1))

def net(noise=False):
    data = x, (x.sum((1, 2)) > 0).long()
    return mh.Task(name="net", model=lambda: Net(noise), train=data, test=data,
                   loss=functional.cross_entropy, target=1)
"""


def test_dropout_of_any_kind_is_switched_off(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A public T5 was called different: it calls dropout as a function."""
    (here / "task.py").write_text(RANDOM)
    words = ["--workers", "1", "--batch", "9", "--accumulate", "2", "--strategy", "allreduce"]
    code, out = answer(capsys, "task.py:net", *words)
    assert code == 0, out
    assert "dropouts and dropout that the model calls as a function were switched off" in out
    assert "draws random numbers" not in out
    _, out = answer(capsys, "task.py:net", "--set", "noise=true", *words)
    assert "note: the model draws random numbers in training, and every worker draws its own" in out
