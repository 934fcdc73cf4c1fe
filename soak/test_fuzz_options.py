"""Random command lines with extreme values: each is answered with a sentence, none crashes or hangs.

They run in forks of this process, which has torch loaded: importing it takes seconds.
"""

from __future__ import annotations

import os
import random
import resource
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from manyhands import cli
from manyhands.records.run_folder import RunFolder
from manyhands.testing.records import record

COUNT = 300
TIME_LIMIT = 90.0  # seconds; refusals take none, and runs are small
MEMORY = 12 * 2**30  # bytes of address space, so that a too large size does not exhaust the machine
UNEXPECTED = ("the whole traceback is in", "Traceback (most recent call last)")

WHOLE = (
    "0", "-1", "1", "2", "3", "7", "64", "129", "1000000", str(2**31), str(2**63 - 1), str(2**63),
    str(10**30), "9" * 5000, "1.5", "1e3", "nan", "", "two", "٣", "0x10", " 5", "+3", "1_000", "-0",
)  # fmt: skip
GOOD = ("1", "2", "3", "7")
REAL = (
    *WHOLE, "inf", "-inf", "1e308", "-1e308", "1e400", "5e-324", "1e-9", "0.5", "0.1", "1e999999999", "NaN",
)  # fmt: skip
TEXT = (
    "", " ", "a", "a" * 300, "a" * 5000, "a/" * 2000, "..", "../..", "/", ".", "/dev/null", "/proc/self/mem",
    "-", "--", "\n", "a\nb", "é", "\u202e", "\x1b[31m", "a\0b", "\udcff", "None", "true", "{}", "[1]", "%s",
    "{0}", "🙂", ":", ".py", ".py:", "x.py:", "x.py:y", "a.py/b.py:c", "*", "~", "~nobody/x", "$HOME",
    "'", '"', "\\", "\t",
)  # fmt: skip
TASKS = ("quadratic", "quadratic", "quadratic", "digits-mlp", "sparse-logistic", "here.py:fine")
NAMES = {
    "strategy": ("single", "allreduce", "average", "server", "hogwild", "layers", "pipeline", "sharded"),
    "transport": ("solo", "threads", "shm", "torch"),
    "launcher": ("inline", "local", "env"),
    "recipe": ("constant", "large-batch", "lars", "lamb"),
    "dtype": ("float32", "float64"),
    "device": ("auto", "cpu", "cuda"),
    "offload": ("none", "all", "conv", "auto"),
    "outer": ("mean", "nesterov", "elastic"),
    "schedule": ("gpipe", "1f1b"),
}
WHOLE_OPTIONS = (
    "threads", "batch", "accumulate", "seed", "servers", "push-every", "pull-every", "bound", "backup",
    "stages", "micro-batches", "samples", "keep", "restarts",
)  # fmt: skip
REAL_OPTIONS = (
    "lr", "epochs", "seconds", "target", "evaluate-every", "checkpoint-every", "timeout", "every", "memory",
)  # fmt: skip
FLAGS = (
    "post-local", "staleness-aware", "recompute", "strict", "sync-batchnorm", "noise-scale", "stop-at-target",
    "resume", "allow-changes", "quiet", "json",
)  # fmt: skip
KEYS = (
    "n", "dimensions", "condition", "width", "features", "nonzeros", "noise", "file", "test", "sparse",
    "recipe.lr", "recipe.momentum", "recipe.warmup", "recipe.decay", "recipe.milestones", "recipe.clip",
    "recipe.beta2", "strategy.every", "strategy.elasticity", "strategy.cut", "strategy.outer_lr", "x.y", "",
    ".",
)  # fmt: skip
HERE = """import torch, manyhands as mh

def task(model):
    data = mh.ArrayData(torch.zeros(8, 3), torch.zeros(8).long())
    loss = torch.nn.functional.cross_entropy
    return mh.Task(name="here", model=model, train=data, test=data, loss=loss, target=0.9)

def fine(*, width: int = 2) -> mh.Task:
    return task(lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)))
"""
STUDY = "[[grid]]\nsamples = 100\n"
FOLDERS = ("finished", "begun", "odd", "empty", "study", "nowhere")


def of_train(draw: random.Random) -> list[str]:
    """A short run with up to four more options."""
    arguments = ["train", draw.choice((*TASKS, *TASKS, *FOLDERS, draw.choice(TEXT)))]
    arguments += ["--samples", "64", "--threads", "1", "--batch", "8", "--evaluate-every", "1000"]
    for _ in range(draw.choice((1, 1, 1, 2, 2, 3, 4))):
        arguments += _option(draw)
    return arguments


def of_verify(draw: random.Random) -> list[str]:
    """One step; most are refused."""
    arguments = ["verify", draw.choice((*TASKS, draw.choice(TEXT))), "--steps", draw.choice(("1", *WHOLE))]
    options = ("workers", "batch", "accumulate", "seed")
    arguments += [f"--{draw.choice(options)}", draw.choice(WHOLE)]
    return arguments + (["--strategy", draw.choice(NAMES["strategy"])] if draw.random() < 0.5 else [])


def of_study(draw: random.Random) -> list[str]:
    """A study file with one extreme setting."""
    key = draw.choice(("repeats", "seed", "batch", "workers", "epochs", "task", "threads", "share", "lr"))
    value = draw.choice((*WHOLE, *REAL))
    quoted = draw.random() < 0.3 or not value.strip()
    task = "" if key == "task" else "task = 'quadratic'\n"
    Path("s.toml").write_text(f"{STUDY}{task}{key} = {repr(value) if quoted else value}\n")
    arguments = ["study", draw.choice(("s.toml", "s.toml", "s.toml", draw.choice(TEXT))), "--dry-run"]
    arguments += ["--jobs", draw.choice(WHOLE)] if draw.random() < 0.3 else []
    return arguments + (["--out", draw.choice((*FOLDERS, *TEXT))] if draw.random() < 0.5 else [])


def of_show(draw: random.Random) -> list[str]:
    """A folder, or any text."""
    return ["show", draw.choice((*FOLDERS, *TEXT)), *draw.choice(([], ["--json"]))]


def of_list(draw: random.Random) -> list[str]:
    """A member, or any text."""
    return ["list", draw.choice((*TASKS, *NAMES["strategy"], *TEXT)), *draw.choice(([], ["--json"]))]


def of_report(draw: random.Random) -> list[str]:
    """A folder to read, and sometimes one to write to."""
    arguments = ["report", draw.choice((*FOLDERS, *TEXT)), "--no-pictures"]
    return arguments + (["--out", draw.choice((*FOLDERS, *TEXT))] if draw.random() < 0.5 else [])


Maker = Callable[[random.Random], list[str]]
VERBS: tuple[Maker, ...] = (*[of_train] * 5, of_verify, of_study, of_show, of_list, of_report)


def _option(draw: random.Random) -> list[str]:
    kind = draw.randrange(8)
    if kind == 0:
        name = draw.choice(list(NAMES))
        return [f"--{name}", draw.choice((*NAMES[name], *NAMES[name], draw.choice(TEXT)))]
    if kind in (1, 2):
        return [f"--{draw.choice(WHOLE_OPTIONS)}", draw.choice((*WHOLE, *GOOD * 6))]
    if kind in (3, 4):
        return [f"--{draw.choice(REAL_OPTIONS)}", draw.choice((*REAL, *GOOD * 6, "2GB", "epoch"))]
    if kind == 5:
        return ["--set", f"{draw.choice(KEYS)}={draw.choice((*REAL, *TEXT, *GOOD * 10))}"]
    if kind == 6:
        return [f"--{draw.choice(FLAGS)}"]
    name = draw.choice(("out", "offload-to", "track", "workers", draw.choice(TEXT)))
    return [f"--{name}", draw.choice((*TEXT, *WHOLE) if name == "workers" else (*FOLDERS, *TEXT))]


class Ending(NamedTuple):
    """How a command line ended."""

    status: int | None  # None: it did not end in time
    error: str


def answered(arguments: list[str], error: Path) -> Ending:
    """Run a command line in a fork, with a time limit."""
    child = os.fork()
    if child == 0:
        _answer(arguments, error)
    until, status = time.monotonic() + TIME_LIMIT, None
    while status is None and time.monotonic() < until:
        pid, found = os.waitpid(child, os.WNOHANG)
        status = found if pid else None
        time.sleep(0.005)
    if status is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return Ending(status, error.read_text(errors="replace"))


def _answer(arguments: list[str], error: Path) -> None:
    """Run it in the fork; never returns."""
    try:
        os.setsid()
        if arguments[0] != "report":  # drawing charts reserves more address space than it uses
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number, path in ((0, os.devnull), (1, os.devnull), (2, str(error))):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="surrogateescape")
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="surrogateescape")
        code = cli.answer(arguments)
        sys.stderr.flush()
        os._exit(code)
    finally:
        os._exit(99)  # an exception that the command line did not catch


def wrong(ending: Ending) -> str | None:
    """What is wrong with an answer, or None."""
    status, error = ending
    if status is None:
        return f"no answer after {TIME_LIMIT:g} s"
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1, 2):
        return f"ended with {code}"
    if any(text in error for text in UNEXPECTED):
        return "an unexpected error"
    sentences = [line for line in error.splitlines() if line.startswith("error: ")]
    if code == 2 and not (len(sentences) == 1 and error.endswith(f"{sentences[0]}\n")):
        return "bad input without exactly one sentence"
    if code == 1 and not sentences:
        return "failed without a sentence"
    if max(map(len, error.splitlines()), default=0) > 2000:
        return "a very long line"
    return None


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the cases, with everything imported that a command may need."""
    import sklearn.datasets  # noqa: F401
    import torch

    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    monkeypatch.setenv("MANYHANDS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def fill(folder: Path) -> None:
    """Fill a folder with runs in several states."""
    folder.mkdir()
    (folder / "here.py").write_text(HERE)
    made = record()
    for name in ("finished", "begun", "odd"):
        train = RunFolder(folder / name)
        train.create()
        train.write_spec(made.spec.replace(task="quadratic"))
        if name != "begun":
            train.write_record(made.model_copy(update={"run": name}))
    (folder / "odd/steps.jsonl").write_text(
        '{"step": 1, "epoch": 0, "samples": 8, "loss": null, "lr": 0.1, "seconds": 0.1, "phases": {}}\n' * 3
    )
    (folder / "empty").mkdir()
    (folder / "study").mkdir()


def test_every_command_line_is_answered(
    workspace: Path,
    count: int | None,
    drawn: random.Random,
    monkeypatch: pytest.MonkeyPatch,
    say: Callable[[str], None],
) -> None:
    failed, codes = [], dict[int | None, int]()
    for number in range(count or COUNT):
        draw = random.Random(drawn.random())
        folder = workspace / f"case-{number}"
        fill(folder)
        monkeypatch.chdir(folder)
        arguments = draw.choice(VERBS)(draw)
        ending = answered(arguments, workspace / f"case-{number}.err")
        codes[ending.status] = codes.get(ending.status, 0) + 1
        if fault := wrong(ending):
            failed.append(f"{fault}: manyhands {shlex.join(arguments)[:400]!r}\n    {ending.error[-600:]}")
    say(f"{sum(codes.values())} command lines: wait status and how often {codes}")
    assert not failed, f"{len(failed)} of {sum(codes.values())}:\n" + "\n".join(failed)
