"""Workers that go at their own pace: who is lost does not end the run, and no sample is lost with it."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import manyhands as mh
from children import Child, warm
from manyhands.callbacks.base import Callback
from manyhands.core.errors import InterruptedRunError, WorkerFailedError
from manyhands.engine.checkpoint.storage import Checkpoints
from manyhands.engine.fault_injection import faults
from manyhands.records.record import RunRecord, StepRecord
from manyhands.records.run_folder import RunFolder
from manyhands.records.spec import RunSpec
from manyhands.runs.defaults import arrange
from manyhands.runs.train import run
from manyhands.testing.launchers import left_over

N = 1000  # samples of the quadratic
EPOCHS = 25
# strategy, who is lost, and of how many
HOGWILD, SERVER = ("hogwild", 1, 2), ("server", 2, 3)
BOTH = pytest.mark.parametrize(("strategy", "lost", "ranks"), [HOGWILD, SERVER], ids=["hogwild", "server"])
KILLED = r"was killed by signal 9 \(SIGKILL, often: out of memory\)"
OPERATION = r"(lock|work|request|answer|add_shared|send|recv|recv_any) [\d,]+"
FAULTS = {
    "SIGKILL": rf"{KILLED} at step 8, in {OPERATION}; the others go on",
    "exit:data": r"ended with exit code 3 at step 8, in data; the others go on",
    "raise:backward": r"raised ScriptedError: raised by script at rank \d, step 8 at step 8, in backward; "
    "the others go on",
    "hang:data": r"has been hanging for \S+ s at step 8, in data; it was killed and the others go on",
    "SIGSTOP:backward": r"has been stopped \(SIGSTOP\) for \S+ s at step 8, in backward; it was killed and "
    "the others go on",
}
QUICK = ("SIGKILL", "exit:data", "raise:backward")  # noticed without waiting


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What starts workers stays for the next run: it is no leftover."""
    folder = tmp_path_factory.mktemp("warm")
    mh.train("quadratic", workers=2, epochs=1, out=folder / "run", quiet=True)
    warm(folder)


def opened() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(autouse=True)
def _nothing_is_left(_warm: None) -> Iterator[None]:
    """No process, shared memory or socket, and no open file."""
    before, files = left_over(), opened()
    yield
    until = time.monotonic() + 5
    while left_over() - before and time.monotonic() < until:
        time.sleep(0.05)
    assert left_over() - before == set()
    assert opened() <= files


class Hear(Callback):
    """Keeps what a person would have read."""

    def __init__(self) -> None:
        self.notices: list[str] = []

    def on_notice(self, text: str) -> None:
        self.notices.append(text)


def script(monkeypatch: pytest.MonkeyPatch, fault: str, rank: int, step: int = 8) -> None:
    kind, _, where = fault.partition(":")
    monkeypatch.setenv(faults.VARIABLE, f"{kind}@{rank}:{step}" + (f":{where}" if where else ""))


def spec(strategy: str, options: dict[str, Any] | None = None, **settings: Any) -> RunSpec:
    chosen = {"workers": 2, "threads": 1, "epochs": EPOCHS, "timeout": 1.5, **settings}
    return RunSpec.of(
        task="quadratic", **arrange({"strategy": strategy, "strategy_options": options or {}, **chosen})
    )


def is_whole(record: RunRecord, epochs: int = EPOCHS) -> list[StepRecord]:
    """Every sample of every epoch was used and counted once, whoever used it."""
    assert record.status == "finished"
    assert record.samples == epochs * N
    steps = RunFolder(Path(record.run)).steps()
    assert [step.step for step in steps] == list(range(1, record.steps + 1))
    assert steps[-1].samples == record.samples
    assert (
        record.steps == epochs * (N // record.spec.batch) * record.spec.workers
    )  # as many as there are pieces
    return steps


# ---------------------------------------------------------------------- losing
@pytest.mark.parametrize(
    ("fault", "strategy", "lost", "ranks"),
    [
        *((fault, *one) for fault in QUICK for one in (HOGWILD, SERVER)),
        ("hang:data", *HOGWILD),
        ("SIGSTOP:backward", *SERVER),
    ],
)
def test_the_others_go_on(
    fault: str, strategy: str, lost: int, ranks: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, fault, lost)
    hear = Hear()
    record = run(
        spec(strategy, epochs=60), out=here / "run", callbacks=[hear]
    )  # longer than it takes to notice
    steps = is_whole(record, 60)
    (notice,) = hear.notices
    expected = rf"worker {lost} of {ranks} \(host \S+, pid \d+\) {FAULTS[fault]}"
    assert re.fullmatch(expected, notice.splitlines()[0]), notice
    (who,) = record.lost
    assert re.fullmatch(rf"worker {lost} after [\d,]+ samples of all", who)
    assert sum(step.worker == lost for step in steps) == record.shares[lost].steps == 8
    assert sum(share.samples for share in record.shares) == record.samples
    assert record.phases[lost] == {}
    assert record.reached


@pytest.mark.parametrize(
    "options", [{"servers": 2}, {"bound": 0}, {"backup": 0}, {"backup": 1}, {"push_every": 2}], ids=str
)
def test_the_others_go_on_with_any_server(
    options: dict[str, Any], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it: not the slices of others, nor who is ahead, nor a round."""
    servers = options.get("servers", 1)
    script(monkeypatch, "SIGKILL:backward", servers + 2)
    record = run(spec("server", options, workers=3, batch=120, epochs=20), out=here / "run", callbacks=[])
    assert (record.status, record.samples) == ("finished", 20 * N)
    assert sum(share.samples for share in record.shares) == record.samples
    assert [who.split(" after")[0] for who in record.lost] == [f"worker {servers + 2}"]


TESTING = """
import os, signal, torch, manyhands as mh
from torch import nn

class Deadly(mh.ArrayData):
    def stream(self, requests, seed):
        for request in requests:
            if 100 in request.samples and os.path.exists("deadly"):
                os.unlink("deadly")
                os.kill(os.getpid(), signal.SIGKILL)
            yield from super().stream([request], seed)

def tested() -> mh.Task:
    inputs = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
    data = inputs, (inputs.sum(1) > 0.5).long()
    return mh.Task(name="tested", model=lambda: nn.Linear(8, 2), train=mh.ArrayData(*data),
                   test=Deadly(*data), loss=nn.functional.cross_entropy, target=0.9, evaluation_batch=10)
"""


def test_the_others_go_on_with_the_test(here: Path) -> None:
    """One dies with a part of the test set in its hands: each of its samples counts, and counts once."""
    (here / "own.py").write_text(TESTING)
    (here / "deadly").touch()
    record = mh.train(
        "own.py:tested", strategy="server", workers=2, threads=1, batch=30, epochs=3, evaluate_every=9.0,
        out=here / "run", quiet=True,
    )  # fmt: skip
    assert len(record.lost) == 1
    assert record.samples == 3 * 300
    held = load_file(RunFolder(here / "run").model)
    inputs = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
    guessed = (inputs @ held["weight"].T + held["bias"]).argmax(1)
    assert record.metric == pytest.approx((guessed == (inputs.sum(1) > 0.5).long()).double().mean().item())


# ---------------------------------------------------------------------- ending
@pytest.mark.parametrize(
    ("fault", "strategy", "lost", "ranks"),
    [("SIGKILL", *HOGWILD), ("SIGKILL", *SERVER), ("hang:data", *SERVER)],
)
def test_strict_is_strict(
    fault: str, strategy: str, lost: int, ranks: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, fault, lost)
    with pytest.raises(WorkerFailedError) as caught:
        run(spec(strategy, strict=True, epochs=10_000), out=here / "run", callbacks=[])
    first, *_, last = str(caught.value).splitlines()
    deed = FAULTS[fault].rpartition("; ")[0]
    assert re.fullmatch(rf"worker {lost} of {ranks} \(.*\) {deed}", first), str(caught.value)
    assert last.endswith(f" with: manyhands train --resume {here / 'run'}")
    assert caught.value.rank == lost


@pytest.mark.parametrize(
    ("strategy", "settings", "lost", "ranks"),
    [
        ("hogwild", {}, 0, 2),  # it keeps the books
        ("server", {}, 0, 3),
        ("server", {"options": {"servers": 2}}, 1, 4),  # it holds a part of the parameters
        ("server", {"workers": 1}, 1, 2),  # nobody else works
        ("server", {"transport": "torch"}, 2, 3),  # a message to the dead does not come back
    ],
    ids=str,
)
def test_without_some_there_is_no_going_on(
    strategy: str,
    settings: dict[str, Any],
    lost: int,
    ranks: int,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script(monkeypatch, "SIGKILL", lost)
    with pytest.raises(WorkerFailedError) as caught:
        run(spec(strategy, epochs=10_000, **settings), out=here / "run", callbacks=[])
    first, *_ = str(caught.value).splitlines()
    assert re.fullmatch(rf"worker {lost} of {ranks} \(.*\) {KILLED} at step 8, in {OPERATION}", first), first


# ---------------------------------------------------------------------- joining
class UntilItWorks(Hear):
    """Ends the run when one that joined has done something."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank, self.steps = rank, 0

    def on_step(self, step: StepRecord) -> None:
        if f"worker {self._rank} has joined" in self.notices and step.worker == self._rank:
            self.steps += 1
            if self.steps == 5:
                os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("fault", "strategy", "lost", "ranks"),
    [("SIGKILL:backward", *HOGWILD), ("raise", *SERVER), ("hang:data", *SERVER)],
)
def test_a_new_one_takes_its_place(
    fault: str, strategy: str, lost: int, ranks: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It claims, reads and writes as the one before it; stopped and resumed, nothing is missing."""
    script(monkeypatch, fault, lost)
    hear = UntilItWorks(lost)
    with pytest.raises(InterruptedRunError):
        run(spec(strategy, restarts=1, epochs=100_000), out=here / "run", callbacks=[hear])
    said = [notice.splitlines()[0] for notice in hear.notices]
    assert len(said) == 2
    assert re.fullmatch(
        rf"worker {lost} of {ranks} \(.*\) .* at step 8, in .* a new one takes its place \(1 of 1\)", said[0]
    )
    assert said[1] == f"worker {lost} has joined"
    stopped = RunFolder(here / "run").record()
    assert stopped is not None
    assert stopped.shares[lost].steps >= 8 + 5
    assert len(stopped.lost) == 1
    assert sum(share.samples for share in stopped.shares) == stopped.samples
    monkeypatch.delenv(faults.VARIABLE)
    until = stopped.samples + 10 * N
    record = mh.train(str(here / "run"), resume=True, allow_changes=True, samples=until, quiet=True)
    assert (record.resumed, record.lost) == (1, [])
    assert 0 <= record.samples - until < 50


class Strike(Hear):
    """Kills one worker and who comes in its place, as soon as it has done something; then ends the run."""

    def __init__(self, folder: Path, rank: int, times: int) -> None:
        super().__init__()
        self._folder, self._rank, self._times = folder, rank, times
        self.struck: list[int] = []

    def on_step(self, step: StepRecord) -> None:
        joined = sum("has joined" in text for text in self.notices)
        if step.worker == self._rank and joined == len(self.struck) < self._times:
            pid = next(pid for pid in workers(self._folder, self._rank) if pid not in self.struck)
            self.struck.append(pid)
            os.kill(pid, signal.SIGKILL)

    def on_notice(self, text: str) -> None:
        super().on_notice(text)
        if text.splitlines()[0].endswith("; the others go on"):
            os.kill(os.getpid(), signal.SIGTERM)


@BOTH
def test_who_is_lost_twice_is_replaced_twice(strategy: str, lost: int, ranks: int, here: Path) -> None:
    """By somebody outside, at any moment; the third time nobody comes."""
    strike = Strike(here, lost, 3)
    with pytest.raises(InterruptedRunError):
        run(spec(strategy, restarts=2, epochs=100_000), out=here / "run", callbacks=[strike])
    record = RunFolder(here / "run").record()
    assert record is not None
    assert len(set(strike.struck)) == len(record.lost) == 3
    assert sum(share.samples for share in record.shares) == record.samples
    fates = [text.splitlines()[0].rpartition("; ")[2] for text in strike.notices if "has joined" not in text]
    assert fates == [f"a new one takes its place ({k} of 2)" for k in (1, 2)] + ["the others go on"]


def workers(folder: Path, rank: int | str = "*") -> list[int]:
    """Processes whose words go to a log in this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            log = (entry / "fd/2").readlink()
        except OSError:
            continue
        if folder in log.parents and log.match(f"rank-{rank}.log"):
            found.append(int(entry.name))
    return found


# ---------------------------------------------------------------------- starting again
@BOTH
def test_the_whole_gang_starts_again_without_the_one_that_keeps_the_books(
    strategy: str, lost: int, ranks: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, "SIGKILL", 0, step=30)
    hear = Hear()
    settings: dict[str, Any] = {"restarts": 1, "checkpoint_every": 0.0, "epochs": 10}
    record = run(spec(strategy, **settings), out=here / "run", callbacks=[hear])
    assert record.resumed == 1
    is_whole(record, 10)
    (notice,) = hear.notices
    assert notice.splitlines()[-1] == "starting again from the last checkpoint (restart 1 of 1)"


def test_killed_as_a_whole_it_goes_on(here: Path) -> None:
    """kill -9 of the process that the user started: the workers end with it."""
    words = ["train", "quadratic", "--strategy", "hogwild", "--workers", "2", "--epochs", f"{EPOCHS}"]
    words += ["--threads", "1", "--checkpoint-every", "0", "--keep", "1000", "--quiet", "--out", "run"]
    child = Child(*words, folder=here)
    written = Checkpoints(here / "run/checkpoints", "")
    child.wait_until(lambda: len(written.paths()) >= 20)
    child.kill()
    deadline = time.monotonic() + 60
    while workers(here):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    record = mh.train(str(here / "run"), resume=True, checkpoint_every=60, quiet=True)
    assert record.resumed == 1
    is_whole(record)
