"""Asynchronous strategies: a lost worker does not end the run, and no sample is lost with it."""

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
from manyhands.runs.defaults import fill_in
from manyhands.runs.train import run
from manyhands.testing.launchers import left_over

N = 1000  # samples of the quadratic
EPOCHS = 25
# strategy, the rank that is lost, and the number of ranks
HOGWILD, SERVER = ("hogwild", 1, 2), ("server", 2, 3)
BOTH = pytest.mark.parametrize(("strategy", "lost", "ranks"), [HOGWILD, SERVER], ids=["hogwild", "server"])
KILLED = r"was killed by signal 9 \(SIGKILL, often because memory ran out\)"
OPERATION = r"(lock|work|request|answer|add_shared|send|recv|recv_any) [\d,]+"
FAULTS = {
    "SIGKILL": rf"{KILLED} at step 8, in {OPERATION}; the others continue",
    "exit:data": r"exited with code 3 at step 8, in data; the others continue",
    "raise:backward": r"raised ScriptedError: raised by script at rank \d, step 8 at step 8, in backward; "
    "the others continue",
    "hang:data": r"has been hanging for \S+ s at step 8, in data; it was killed, and the others continue",
    "SIGSTOP:backward": r"has been stopped \(SIGSTOP\) for \S+ s at step 8, in backward; it was killed, and "
    "the others continue",
}
QUICK = ("SIGKILL", "exit:data", "raise:backward")  # noticed at once


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The fork server stays for the next run: it is not left behind."""
    folder = tmp_path_factory.mktemp("warm")
    mh.train("quadratic", workers=2, epochs=1, out=folder / "run", quiet=True)
    warm(folder)


def open_files() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(autouse=True)
def _nothing_is_left(_warm: None) -> Iterator[None]:
    """No process, shared memory or socket, and no open file."""
    before, files = left_over(), open_files()
    yield
    until = time.monotonic() + 5
    while left_over() - before and time.monotonic() < until:
        time.sleep(0.05)
    assert left_over() - before == set()
    assert open_files() <= files


class Notices(Callback):
    """Collects the notices."""

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
        task="quadratic", **fill_in({"strategy": strategy, "strategy_options": options or {}, **chosen})
    )


def is_whole(record: RunRecord, epochs: int = EPOCHS) -> list[StepRecord]:
    """Every sample of every epoch was used and counted once, by any worker."""
    assert record.status == "finished"
    assert record.samples == epochs * N
    steps = RunFolder(Path(record.run)).steps()
    assert [step.step for step in steps] == list(range(1, record.steps + 1))
    assert steps[-1].samples == record.samples
    assert record.steps == epochs * (N // record.spec.batch) * record.spec.workers  # one per piece of a batch
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
def test_the_others_continue(
    fault: str, strategy: str, lost: int, ranks: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, fault, lost)
    notices = Notices()
    # 60 epochs take longer than noticing the fault
    record = run(spec(strategy, epochs=60), out=here / "run", callbacks=[notices])
    steps = is_whole(record, 60)
    (notice,) = notices.notices
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
def test_the_others_continue_with_any_server_option(
    options: dict[str, Any], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker waits for it: not in other slices, nor at the staleness bound, nor in a round."""
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


def test_the_others_continue_the_evaluation(here: Path) -> None:
    """A worker dies while it evaluates a part of the test set: each of its samples counts exactly once."""
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
def test_strict_ends_the_run(
    fault: str, strategy: str, lost: int, ranks: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, fault, lost)
    with pytest.raises(WorkerFailedError) as caught:
        run(spec(strategy, strict=True, epochs=10_000), out=here / "run", callbacks=[])
    first, *_, last = str(caught.value).splitlines()
    happened = FAULTS[fault].rpartition("; ")[0]
    assert re.fullmatch(rf"worker {lost} of {ranks} \(.*\) {happened}", first), str(caught.value)
    assert last.endswith(f" with: manyhands train --resume {here / 'run'}")
    assert caught.value.rank == lost


@pytest.mark.parametrize(
    ("strategy", "settings", "lost", "ranks"),
    [
        ("hogwild", {}, 0, 2),  # it keeps the work queue
        ("server", {}, 0, 3),
        ("server", {"options": {"servers": 2}}, 1, 4),  # it holds a part of the parameters
        ("server", {"workers": 1}, 1, 2),  # there is no other worker
        ("server", {"transport": "torch"}, 2, 3),  # a message to a dead worker gets no answer
    ],
    ids=str,
)
def test_the_loss_of_a_needed_rank_ends_the_run(
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
class UntilReplaced(Notices):
    """Ends the run when a replacement has made some steps."""

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
def test_a_lost_worker_is_replaced(
    fault: str, strategy: str, lost: int, ranks: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replacement works like the worker before it; stopped and resumed, nothing is missing."""
    script(monkeypatch, fault, lost)
    notices = UntilReplaced(lost)
    with pytest.raises(InterruptedRunError):
        run(spec(strategy, restarts=1, epochs=100_000), out=here / "run", callbacks=[notices])
    lines = [notice.splitlines()[0] for notice in notices.notices]
    assert len(lines) == 2
    assert re.fullmatch(
        rf"worker {lost} of {ranks} \(.*\) .* at step 8, in .*; (it was killed, and )?"
        r"a new worker replaces it \(replacement 1 of 1\)",
        lines[0],
    )
    assert lines[1] == f"worker {lost} has joined"
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


class Killer(Notices):
    """Kills one worker and its replacements, as soon as they have made a step; then ends the run."""

    def __init__(self, folder: Path, rank: int, times: int) -> None:
        super().__init__()
        self._folder, self._rank, self._times = folder, rank, times
        self.killed: list[int] = []

    def on_step(self, step: StepRecord) -> None:
        joined = sum("has joined" in text for text in self.notices)
        if step.worker == self._rank and joined == len(self.killed) < self._times:
            pid = next(pid for pid in workers(self._folder, self._rank) if pid not in self.killed)
            self.killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    def on_notice(self, text: str) -> None:
        super().on_notice(text)
        if text.splitlines()[0].endswith("; the others continue"):
            os.kill(os.getpid(), signal.SIGTERM)


@BOTH
def test_a_worker_lost_twice_is_replaced_twice(strategy: str, lost: int, ranks: int, here: Path) -> None:
    """Killed from outside, at any moment; the third time it is not replaced."""
    killer = Killer(here, lost, 3)
    with pytest.raises(InterruptedRunError):
        run(spec(strategy, restarts=2, epochs=100_000), out=here / "run", callbacks=[killer])
    record = RunFolder(here / "run").record()
    assert record is not None
    assert len(set(killer.killed)) == len(record.lost) == 3
    assert sum(share.samples for share in record.shares) == record.samples
    endings = [
        text.splitlines()[0].rpartition("; ")[2] for text in killer.notices if "has joined" not in text
    ]
    assert endings == [f"a new worker replaces it (replacement {k} of 2)" for k in (1, 2)] + [
        "the others continue"
    ]


def workers(folder: Path, rank: int | str = "*") -> list[int]:
    """Processes whose output goes to a log in this folder."""
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
def test_all_workers_start_again_without_rank_0(
    strategy: str, lost: int, ranks: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, "SIGKILL", 0, step=30)
    notices = Notices()
    settings: dict[str, Any] = {"restarts": 1, "checkpoint_every": 0.0, "epochs": 10}
    record = run(spec(strategy, **settings), out=here / "run", callbacks=[notices])
    assert record.resumed == 1
    is_whole(record, 10)
    (notice,) = notices.notices
    assert notice.splitlines()[-1] == "starting again from the last checkpoint (restart 1 of 1)"


def test_killed_as_a_whole_it_resumes(here: Path) -> None:
    """SIGKILL of the process that the user started: the workers end with it."""
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
