"""What `--workers auto` makes of its measurements, and that they can be interrupted at any moment."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from manyhands.core import environment
from manyhands.core.errors import InterruptedRunError
from manyhands.core.signals import StopRequest
from manyhands.engine.probe import measure
from manyhands.launchers.inline import InlineLauncher
from manyhands.launchers.local import LocalLauncher
from manyhands.records.spec import RunSpec
from manyhands.runs import autotune
from manyhands.runs.autotune import Split
from manyhands.runs.defaults import fill_in
from manyhands.runs.resolve import resolve

SENTENCE = r"^interrupted by {} while speeds were measured, before the run began$"
IMPATIENT = """
import signal, torch, manyhands as mh
from torch import nn

asked = []

def loss(outputs, targets):
    if len(outputs) == 4 and not asked:  # once: a second Ctrl-C does not wait for the step to end
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


# ---- what it makes of its measurements


TWO = [Split(1, 2), Split(2, 1)]
FOUR = [Split(1, 4), Split(2, 2), Split(4, 1)]


@pytest.mark.parametrize(
    ("found", "rounds", "workers", "why"),
    [
        (TWO, [[1000, 1400], [1000, 1400]], 2, ""),
        (TWO, [[1400, 1000], [1400, 1000]], 1, ""),
        (TWO, [[1000, 1050], [1000, 1050]], 1, "; these are not told apart, so the fewest workers are best"),
        (
            FOUR,
            [[1000, 1900, 2000], [1000, 1900, 2000]],
            2,
            "; 2 workers x 2 threads and 4 workers x 1 thread are not told apart, so the fewest workers are "
            "best",
        ),
    ],
)
def test_the_fewest_workers_win_among_those_not_told_apart(
    found: list[Split], rounds: list[list[float]], workers: int, why: str
) -> None:
    chosen = autotune.decide(found, rounds)
    assert (chosen.split.workers, chosen.why) == (workers, why)


def test_speeds_are_compared_within_a_round() -> None:
    """In the second round the machine was twice as slow: the ratio is the same, and so is the answer."""
    assert autotune.decide(TWO, [[1000, 1400], [500, 700]]).split.workers == 2
    assert autotune.decide(TWO, [[1000, 1400], [700, 500]]).split.workers == 1, "once faster, once slower"


@pytest.mark.parametrize(("rate", "beyond"), [(2200.0, False), (2400.0, True)])
def test_more_than_the_cores_can_give_is_implausible(rate: float, beyond: bool) -> None:
    assert (autotune.beyond([[1000, rate]] * 2, cores=2) is not None) is beyond
    assert autotune.beyond([[1000, rate]] * 2, cores=4) is None


@pytest.mark.parametrize(
    ("slow_rounds", "workers", "last"),
    [
        (0, 1, r"^auto: 1 worker x 2 threads 15,000 images/s, .*: taking 1 worker x 2 threads$"),
        (2, 1, r"^auto: 1 worker x 2 threads 15,000 images/s, .*: taking 1 worker x 2 threads$"),
        (4, 2, r"^auto: 53x 1 worker x 2 threads \(.*\) is implausible: 2 cores can give 2x\. The baseline"),
    ],
)
def test_an_implausible_speed_is_measured_again_and_then_said(
    slow_rounds: int, workers: int, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`302 images/s against 16,025: taking 2 workers` was said while something else used the machine."""
    alone: list[float] = []

    def launch(_: Any, function: Any, ranks: int, *arguments: Any) -> list[float]:
        if ranks > 1:
            return [16_025.0]
        alone.append(302.0 if len(alone) < slow_rounds else 15_000.0)
        return [alone[-1]]

    monkeypatch.setattr(LocalLauncher, "launch", launch)
    monkeypatch.setattr(environment, "cores", lambda: 2)
    said: list[str] = []
    chosen = autotune.choose(RunSpec.of(task="digits-mlp", batch=32), "images", said.append)
    assert chosen.workers == workers
    assert re.search(last, said[-1])
    assert len(alone) == (2 if slow_rounds == 0 else 4), "once more, and not for ever"
    again = "auto: a speed is more than the cores can give; measuring again"
    assert (again in said) is (slow_rounds > 0)


def test_one_way_to_use_the_cores_needs_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "cores", lambda: 1)
    said: list[str] = []
    chosen = autotune.choose(RunSpec.of(task="digits-mlp", batch=32), "images", said.append)
    assert (chosen.workers, chosen.threads) == (1, 1)
    assert said == ["auto: taking 1 worker x 1 thread, the only split of the cores"]
