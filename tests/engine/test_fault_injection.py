"""Fault injection: how faults are written, and that each happens once, at its rank and step."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from manyhands.core.errors import UsageError
from manyhands.data.base import Batch
from manyhands.engine.fault_injection import faults
from manyhands.engine.fault_injection.faults import Fault, ScriptedError, Slow
from manyhands.engine.fault_injection.faulty_compute import SlowedCompute
from manyhands.strategies.base import Compute


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("SIGKILL@1:20", Fault("SIGKILL", 1, 20, "collective")),
        ("hang@0:5:data", Fault("hang", 0, 5, "data")),
        ("raise@12:0:backward", Fault("raise", 12, 0, "backward")),
    ],
)
def test_a_script_is_read(text: str, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Fault.parse(text) == fault
    monkeypatch.setenv(faults.VARIABLE, text)
    assert faults.from_environment() == fault


@pytest.mark.parametrize(
    "text", ["", "boom@1:2", "hang", "hang@1", "hang@-1:2", "hang@1:2:lunch", "hang@1:2:"]
)
def test_a_wrong_script_is_answered(text: str) -> None:
    with pytest.raises(UsageError, match=rf"^MANYHANDS_FAULT='{text}' is not KIND@RANK:STEP or "):
        Fault.parse(text)


def test_it_is_due_at_one_rank_step_and_place_only() -> None:
    fault = Fault("raise", 1, 5, "data")
    assert fault.due(1, 5, "data")
    assert not any(fault.due(*other) for other in [(0, 5, "data"), (1, 4, "data"), (1, 5, "backward")])
    with pytest.raises(ScriptedError, match=r"^raised by script at rank 1, step 5$"):
        fault.strike()


def test_nothing_happens_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    assert faults.from_environment() is None


@pytest.mark.parametrize(
    ("text", "slow"), [("4@1", Slow(4.0, 1)), ("1.5@12", Slow(1.5, 12)), ("1@0", Slow(1, 0))]
)
def test_one_rank_is_slower_than_it_could_be(text: str, slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Slow.parse(text) == slow
    monkeypatch.setenv(faults.SLOW, text)
    assert faults.slowness(slow.rank) == slow.factor
    assert faults.slowness(slow.rank + 1) == 1.0
    monkeypatch.delenv(faults.SLOW)
    assert faults.slowness(slow.rank) == 1.0


@pytest.mark.parametrize(
    "text", ["", "4", "4@", "@1", "fast@1", "0@1", "0.9@1", "-4@1", "4@-1", "4@1@2", "nan@1", "1e9@1"]
)
def test_how_much_slower_must_be_said(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Slow.parse(text)
    assert str(caught.value) == (
        f"MANYHANDS_SLOW={text!r} is not FACTOR@RANK with a factor of at least 1, such as 4@1"
    )


def test_a_straggler_computes_the_same_and_rests() -> None:
    """Forward and backward take longer by the factor; their results do not change."""

    class Spent(Compute):
        def forward(self, model: nn.Module, batch: Batch, weight: float) -> Tensor:
            time.sleep(0.02)
            return super().forward(model, batch, weight)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean()

    model, batch = nn.Linear(3, 1), Batch(torch.ones(4, 3), torch.zeros(4, 1))
    plain, slowed = Spent(loss), SlowedCompute(Spent(loss), 4.0)
    begun = time.perf_counter()
    once = plain.forward(model, batch, 0.5)
    between = time.perf_counter()
    again = slowed.forward(model, batch, 0.5)
    assert time.perf_counter() - between >= 0.08 > 0.02 <= between - begun
    assert torch.equal(once, again)
    slowed.backward(again)
    assert model.weight.grad is not None
