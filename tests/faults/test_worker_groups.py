"""Several workers as a user runs them: every starter gives the same bits, nothing is lost or left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import manyhands as mh
from children import Child
from conftest import AS_ROOT, Answer, called
from manyhands.callbacks.base import Callback
from manyhands.core import environment
from manyhands.core.errors import InterruptedRunError, WorkerFailedError
from manyhands.engine.checkpoint.storage import Checkpoints
from manyhands.engine.fault_injection import faults
from manyhands.records.record import OneWorker, RunRecord, Start, StepRecord
from manyhands.records.run_folder import RunFolder
from manyhands.records.spec import RunSpec
from manyhands.runs import autotune
from manyhands.runs.train import run
from manyhands.testing.launchers import left_over

BIN = Path(sys.executable).parent
SETTINGS = ["digits-mlp", "--epochs", "3", "--batch", "50"]  # 25 per worker, and a smaller last batch


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert [name for name in left_over() if name.startswith("/dev/shm/manyhands")] == []


def last(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a run's last checkpoint."""
    return load_file(Checkpoints(RunFolder(folder).checkpoints, "").paths()[-1])


def alive(marker: str) -> list[str]:
    """Command lines of living processes that run in a folder of this name, without our own fork server."""
    found = []
    ours = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name not in ours:
            try:
                if marker in str((entry / "cwd").readlink()) and int(entry.name) != os.getpid():
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    found += [(entry / "cmdline").read_text()] if state != "Z" else []
            except OSError:
                continue
    return found


def check_none_is_left(marker: str) -> None:
    """The workers of a process end soon after it."""
    for _ in range(100):
        if not alive(marker):
            break
        time.sleep(0.05)
    assert alive(marker) == [], "workers outlived their parent"


@pytest.mark.slow
@pytest.mark.parametrize("task", ["quadratic", pytest.param("digits-mlp", marks=pytest.mark.soak)])
def test_every_starter_gives_the_same_bits(tmp_path: Path, typed: Callable[..., Answer], task: str) -> None:
    """`manyhands train --workers 2`, torchrun, mpirun, and the mpi launcher."""
    train = ["train", task, "--epochs", "3", "--batch", "46"]  # 23 per worker, and a ragged end
    commands = {
        "local": [*train, "--workers", "2"],
        "torch": [*train, "--workers", "2", "--transport", "torch"],
        "torchrun": ["torchrun", "--nproc-per-node", "2", "--master-port", "29517", "-m", "manyhands"],
    }
    if (BIN / "mpirun").exists():
        commands |= {
            "mpi": [*train, "--workers", "2", "--transport", "mpi"],
            "mpirun": ["mpirun", "-n", "2", "--map-by", ":OVERSUBSCRIBE", sys.executable, "-m", "manyhands"],
        }
    states, losses = {}, {}
    for name, words in commands.items():
        out = ["--out", name, "--json"]
        if words[0] == "train":
            answer = typed(*words, *out)
        else:
            answer = called([BIN / words[0], *words[1:], *train, *out], tmp_path, **AS_ROOT)
        assert answer.code == 0, (name, answer.err)
        record = RunRecord.model_validate_json(answer.out)  # one rank prints, and nothing else is printed
        assert len(record.phases) == len(record.traffic) == len(record.hosts) == 2
        states[name], losses[name] = last(tmp_path / name), record.loss
    for name, state in states.items():
        assert losses[name] == losses["local"], name
        for tensor, value in states["local"].items():
            if not tensor.startswith("random/"):
                assert torch.equal(state[tensor], value), (name, tensor)
    assert alive(str(tmp_path)) == []


def train(out: Path, workers: int, **settings: object) -> RunRecord:
    return mh.train("digits-mlp", epochs=3, batch=50, workers=workers, out=out, quiet=True, **settings)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two workers, which tests only read."""
    folder = tmp_path_factory.mktemp("groups") / "two"
    train(folder, 2)
    return folder


@pytest.mark.usefixtures("one_core")
def test_two_workers_learn_what_one_does(here: Path, two: Path) -> None:
    one = train(here / "one", 1)
    assert mh.load(two).metric == pytest.approx(one.metric, abs=0.011)
    assert [step.samples for step in RunFolder(two).steps()] == [
        step.samples for step in RunFolder(here / "one").steps()
    ]
    for first, second in zip(RunFolder(here / "one").steps()[:20], RunFolder(two).steps()[:20], strict=True):
        assert second.loss == pytest.approx(first.loss, rel=1e-4)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a complete run of three workers, and one that was killed."""
    folder = tmp_path_factory.mktemp("three")
    train(folder / "whole", 3)
    words = ["--workers", "3", "--out", "killed", "--checkpoint-every", "0", "-q"]
    child = Child("train", *SETTINGS, *words, folder=folder)
    checkpoints = Checkpoints(folder / "killed/checkpoints", "")
    child.wait_until(lambda: len(checkpoints.paths()) >= 2)
    child.kill()
    check_none_is_left(folder.name)
    return folder


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize(("then", "equal"), [(3, True), (2, False), (1, False)])
def test_killed_with_three_workers_it_resumes_with_as_many_or_fewer(
    here: Path, killed: Path, then: int, equal: bool
) -> None:
    """Law 6: the same samples in the same order; with as many workers the same bits."""
    whole = killed / "whole"
    shutil.copytree(killed / "killed", here / "killed")
    notices: list[str] = []

    class Notices(Callback):
        def on_notice(self, text: str) -> None:
            notices.append(text)

    from manyhands.runs.train import resume_folder

    resumed = resume_folder(here / "killed", {"workers": then}, callbacks=[Notices()])
    assert resumed.resumed == 1
    assert any(text.startswith("continuing with") and f"workers 3 -> {then}" in text for text in notices) == (
        then != 3
    )
    steps, expected = RunFolder(here / "killed").steps(), RunFolder(whole).steps()
    assert [(step.step, step.samples) for step in steps] == [(step.step, step.samples) for step in expected]
    for mine, theirs in zip(steps, expected, strict=True):
        assert mine.loss == (theirs.loss if equal else pytest.approx(theirs.loss, rel=2e-3, abs=1e-5))
    for name, tensor in last(whole).items():
        if equal:
            assert torch.equal(last(here / "killed")[name], tensor), name
    assert resumed.metric == pytest.approx(mh.load(whole).metric, abs=0.006)


def test_a_worker_that_fails_is_started_again_from_the_last_checkpoint(
    here: Path, two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(faults.VARIABLE, "SIGKILL@1:40")
    with pytest.raises(WorkerFailedError, match=r"was killed by signal 9 \(SIGKILL.*at step 40") as caught:
        train(here / "ended", 2, checkpoint_every=0)
    assert re.search(
        r"\nthe last checkpoint is of step (39|40); continue with: manyhands train --resume \S+/ended$",
        str(caught.value),
    )
    record = train(here / "again", 2, checkpoint_every=0, restarts=1)
    assert (record.status, record.resumed, record.loss) == ("finished", 1, mh.load(two).loss)
    for name, tensor in last(two).items():
        assert torch.equal(last(here / "again")[name], tensor), name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_parent_stops_all_workers_with_a_checkpoint(
    here: Path, number: signal.Signals
) -> None:
    class At(Callback):
        def on_step(self, step: StepRecord) -> None:
            if step.step == 5:
                os.kill(os.getpid(), number)

    spec = RunSpec.of(
        task="quadratic", workers=2, strategy="allreduce", transport="shm", launcher="local", epochs=100_000
    )
    with pytest.raises(
        InterruptedRunError, match=rf"^interrupted by {number.name} at step [\d,]+; the last"
    ) as caught:
        run(spec, out=here / "run", callbacks=[At()])
    assert caught.value.exit_code == 128 + number
    record = RunFolder(here / "run").record()
    assert record is not None
    assert record.status == "interrupted"
    assert (here / f"run/checkpoints/step-{record.steps:09d}.safetensors").is_file()


@pytest.mark.slow
def test_ctrl_c_in_a_terminal(here: Path) -> None:
    """The whole foreground group gets it: one message, one exit code, no process left."""
    child = subprocess.Popen(
        [sys.executable, "-m", "manyhands", "train", "quadratic", "--workers", "2", "--epochs", "100000"],
        cwd=here,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not any(path.stat().st_size for path in here.glob("runs/*/steps.jsonl")):
        assert child.poll() is None
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGINT)
    _, err = child.communicate(timeout=30)
    assert child.returncode == 130
    assert err.count("error:") == 1
    assert "error: interrupted by SIGINT at step" in err
    assert alive(str(here)) == []


# The first step creates a file, and the first step is part of the measurement.
MARKED = """
import torch, manyhands as mh
from pathlib import Path
from torch import nn

def loss(outputs, targets):
    if len(outputs) > 8:  # not while the task is examined
        Path("measuring").touch()
    return nn.functional.cross_entropy(outputs, targets)

def marked() -> mh.Task:
    data = mh.ArrayData(torch.zeros(512, 3), torch.zeros(512).long())
    network = lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return mh.Task(name="marked", model=network, train=data, test=data, loss=loss, target=1)
"""


@pytest.mark.parametrize("words", [["--strategy", "pipeline", "--workers", "2"], ["--workers", "auto"]])
def test_ctrl_c_while_speeds_are_measured(here: Path, words: list[str]) -> None:
    """There is no run yet, and none is started."""
    (here / "own.py").write_text(MARKED)
    child = Child("train", "own.py:marked", "--batch", "256", *words, "--out", "run", folder=here)
    child.wait_until((here / "measuring").exists)
    child.send(signal.SIGINT)
    assert child.end() == 130
    assert child.output == ("error: interrupted by SIGINT while speeds were measured, before the run began\n")
    assert not (here / "run").exists()
    check_none_is_left(here.name)


def test_the_time_limit_ends_all_workers_at_once(here: Path) -> None:
    record = mh.train("quadratic", workers=3, seconds=0.2, epochs=1_000_000, out=here / "run", quiet=True)
    assert record.status == "finished"
    assert 0.2 <= record.training_seconds < 60  # a million epochs would take hours


def test_divergence_is_reported_once(here: Path) -> None:
    from manyhands.core.errors import DivergedError

    with pytest.raises(DivergedError, match=r"^the loss became (nan|inf) at step \d+"):
        mh.train("quadratic", workers=2, lr=1e6, out=here / "run", quiet=True)
    record = RunFolder(here / "run").record()
    assert record is not None
    assert record.status == "diverged"


def test_a_second_run_of_one_parent_starts_quicker_than_importing_torch(here: Path, two: Path) -> None:
    """The fork server has imported torch already."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    imported = time.perf_counter() - began
    starts: list[float] = []

    class Mark(Callback):
        def on_start(self, start: Start) -> None:
            starts.append(time.perf_counter())

    for number in range(3):
        began = time.perf_counter()
        spec = RunSpec.of(
            task="quadratic", workers=2, strategy="allreduce", transport="shm", launcher="local"
        )
        run(spec, out=here / f"run{number}", callbacks=[Mark()])
        starts[-1] -= began
    assert min(starts) < imported


def test_auto_measures_and_reports_its_choice(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotune, "SECONDS", 0.2)  # the report is tested, not the quality of the measurement
    record = mh.train("digits-mlp", workers="auto", epochs=1, out=here / "run")
    said = capfd.readouterr().err
    match = re.search(r"^auto: (.*): taking (\d+) workers? x (\d+) threads?$", said, re.MULTILINE)
    assert match, said
    rates = {
        name: float(rate.replace(",", ""))
        for name, rate in re.findall(r"(\d+ \w+ x \d+ \w+) ([\d,]+)", match[1])
    }
    best = max(rates, key=lambda name: rates[name])
    assert best.startswith(f"{record.spec.workers} worker") or "not told apart" in match[1]
    assert record.spec.workers * record.environment.threads == environment.cores()


def test_the_bar_compares_with_the_last_run_of_one_worker(here: Path) -> None:
    seen: list[Start] = []

    class Look(Callback):
        def on_start(self, start: Start) -> None:
            seen.append(start)

    one = mh.train("digits-mlp", epochs=1, threads=1, quiet=True)
    settings = {"strategy": "allreduce", "transport": "shm", "launcher": "local", "workers": 2}
    run(RunSpec.of(task="digits-mlp", epochs=1, **settings), out=here / "run", callbacks=[Look()])
    assert seen[0].one_worker == OneWorker(one.samples_per_second, 1)


def test_json_of_a_run_with_workers(two: Path) -> None:
    record = mh.load(two)
    held = json.loads((two / "result.json").read_text())
    assert held["spec"]["workers"] == 2
    for rank in held["traffic"]:
        assert rank["barrier"]["calls"] >= 2 * record.steps
        assert rank["add_shared"]["bytes"] > 0


def test_the_next_run_removes_what_a_killed_run_left_and_says_so(here: Path) -> None:
    """All processes may be killed in the short time during which shared memory has a name."""
    code = (
        "from manyhands.transports.shm import leftovers; import os, signal; "
        "path = leftovers.home() / leftovers.new_name('arena'); path.write_bytes(b'x'); "
        "print(path, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    left = Path(done.stdout.strip())
    assert left.exists()
    notices: list[str] = []

    class Notices(Callback):
        def on_notice(self, text: str) -> None:
            notices.append(text)

    run(RunSpec.of(task="quadratic", epochs=1), out=here / "run", callbacks=[Notices()])
    assert f"removed {left.name}, left behind by a run that was killed" in notices
    assert not left.exists()
