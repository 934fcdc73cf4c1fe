"""A measurement before a run can be interrupted: while it measures, and while workers start and end."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from manyhands.core.errors import InterruptedRunError
from manyhands.core.signals import StopRequest
from manyhands.engine.probe import measure
from manyhands.launchers.inline import InlineLauncher
from manyhands.launchers.local import LocalLauncher
from manyhands.records.spec import RunSpec
from manyhands.runs import autotune
from manyhands.runs.defaults import fill_in
from manyhands.runs.resolve import resolve

SENTENCE = r"^interrupted by {} while speeds were measured, before the run began$"
IMPATIENT = """
import signal, torch, manyhands as mh
from torch import nn

asked = []

def loss(outputs, targets):
    if not asked:  # once: a second Ctrl-C does not wait for the step to end
        asked.append(signal.raise_signal(signal.SIGINT))
    return nn.functional.cross_entropy(outputs, targets)

def impatient() -> mh.Task:
    data = mh.ArrayData(torch.zeros(8, 3), torch.zeros(8).long())
    model = lambda: nn.Linear(3, 2)
    return mh.Task(name="impatient", model=model, train=data, test=data, loss=loss, target=1)
"""


def test_one_worker_in_this_process_hears_it(here: Path) -> None:
    (here / "own.py").write_text(IMPATIENT)
    spec = resolve(RunSpec.of(task="own.py:impatient", batch=4, threads=1))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(InterruptedRunError, match=SENTENCE.format("SIGINT")) as caught:
        InlineLauncher().launch(measure, 1, spec, 60.0)
    assert caught.value.exit_code == 130
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("found", [autotune.choose, autotune.with_micro_batches])
def test_a_signal_after_the_last_step_counts(
    found: Any, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers take a moment to end; a signal that arrives meanwhile counts too."""
    calls = []

    def launch(*arguments: Any) -> list[Any]:
        calls.append(arguments)
        with StopRequest():
            signal.raise_signal(number)
        return [1000.0] if found is autotune.choose else [[1000.0, 2000.0, 1500.0]]

    monkeypatch.setattr(LocalLauncher, "launch", launch)
    spec = RunSpec.of(task="digits-mlp", batch=32, **fill_in({"strategy": "pipeline", "workers": 2}))
    said: list[str] = []
    with pytest.raises(InterruptedRunError, match=SENTENCE.format(number.name)) as caught:
        found(spec, "images", said.append)
    assert caught.value.exit_code == 128 + number
    assert (len(calls), said) == (1, [])
