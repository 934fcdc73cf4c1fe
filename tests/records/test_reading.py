"""Files of a run that are damaged, or come from a stranger: each is answered with a sentence (D16, D14)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from conftest import Answer
from manyhands.callbacks.journal import Journal
from manyhands.core.errors import ManyhandsError
from manyhands.records.run_folder import RunFolder
from manyhands.records.spec import RunSpec
from manyhands.records.study_results import StudyFolder
from manyhands.study.attempt import tidy

DEEP = "[" * 5000 + "]" * 5000
DEEP_ENOUGH = '{"a": ' + "[" * 200 + "]" * 200 + "}"  # for JSON to read, too deep for us
LONG = "9" * 5000
DAMAGED = "run/spec.json is damaged:"
ELSEWHERE = '{"event": "failed", "cell": "a", "run": "../elsewhere"}'


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, to damage copies of."""
    folder = tmp_path_factory.mktemp("made") / "run"
    mh.train("quadratic", epochs=1, threads=1, checkpoint_every=0, quiet=True, out=folder)
    return folder


@pytest.fixture
def run(made: Path, here: Path) -> Path:
    shutil.copytree(made, here / "run")
    return Path("run")


def changed(path: Path, **fields: Any) -> str:
    return json.dumps({**json.loads(path.read_text()), **fields})


SPEC: dict[str, tuple[str | bytes, str]] = {
    "a list": ("[]", f"{DAMAGED} it is a list, not an object"),
    "a number": ("3", f"{DAMAGED} it is a number, not an object"),
    "null": ("null", f"{DAMAGED} it is null, not an object"),
    "a text": ('"x"', f"{DAMAGED} it is a text, not an object"),
    "nothing": ("", f"{DAMAGED} it is not JSON (expecting value: line 1 column 1 (char 0))"),
    "deep": (DEEP, f"{DAMAGED} it is nested too deeply"),
    "deep enough": (DEEP_ENOUGH, f"{DAMAGED} it is nested too deeply"),
    "NUL": (
        b"\0" * 9,
        f"{DAMAGED} it is not JSON (expecting value: line 1 column 1 (char 0))",
    ),
    "NUL in a text": ('{"task": "a\\u0000"}', f"{DAMAGED} a text in it contains a NUL character"),
    "half a character": (
        '{"task": "\\ud800"}',
        f"{DAMAGED} a text in it contains half a character",
    ),
    "no UTF-8": (b'{"task": "\xff"}', f"{DAMAGED} it is not UTF-8 text"),
    "NaN": ('{"task": "quadratic", "epochs": NaN}', f"{DAMAGED} NaN is not a number"),
    "huge": (
        '{"task": "quadratic", "epochs": 1e999}',
        f"{DAMAGED} a number in it is too large",
    ),
    "long": (
        f'{{"task": "quadratic", "seed": {LONG}}}',
        f"{DAMAGED} a number in it is too large",
    ),
    "cls": (
        '{"task": "quadratic", "cls": 1}',
        "run/spec.json is not a run's spec: a run has no setting 'cls' (known: task, ",
    ),
    "a wrong type": (
        '{"task": 3}',
        "run/spec.json is not a run's spec: task should be a valid string, got 3",
    ),
    "servers": (
        '{"task": "quadratic", "strategy": "server", "strategy_options": {"servers": "x"}}',
        "run/spec.json is not a run's spec: option servers of the strategy should be a whole number, got 'x'",
    ),
    "stages": (
        '{"task": "quadratic", "strategy": "pipeline", "strategy_options": {"stages": []}}',
        "run/spec.json is not a run's spec: option stages of the strategy should be a whole number, got []",
    ),
}


@pytest.mark.parametrize("verb", ["show", "show --json", "train --resume"])
@pytest.mark.parametrize("case", SPEC)
def test_a_spec_is_a_spec(case: str, verb: str, run: Path, typed: Callable[..., Answer]) -> None:
    content, sentence = SPEC[case]
    (run / "spec.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    answer = typed(*verb.split(), "run")
    assert answer.err.startswith(f"error: {sentence}")
    assert answer.err.count("\n") == 1
    assert answer.err == f"error: {sentence}\n" or sentence.endswith(", ")
    assert answer.code in (1, 2)
    assert answer.out == ""


RESULT: dict[str, tuple[Callable[[Path], str], str]] = {
    "deep": (lambda path: DEEP, "run/result.json is damaged: it is nested too deeply"),
    "a list": (lambda path: "[]", "run/result.json is damaged: it is a list, not an object"),
    "cut off": (lambda path: path.read_text()[:40], "run/result.json is damaged: it is not JSON ("),
    "nothing in it": (lambda path: "{}", "run/result.json is not a run's result: id: field required"),
    "a text for a count": (
        lambda path: changed(path, steps="many"),
        "run/result.json is not a run's result: steps: input should be a valid integer, ",
    ),
    "less than nothing": (
        lambda path: changed(path, samples=-3),
        "run/result.json is damaged: samples: -3 is not a count or a time",
    ),
    "a rate beyond reason": (
        lambda path: changed(path, samples_per_second=8e30),
        "run/result.json is damaged: samples_per_second: 8e+30 is not a count or a time",
    ),
    "no rank": (
        lambda path: changed(path, phases=[]),
        "run/result.json is damaged: phases: there is no rank",
    ),
    "hosts of whom": (
        lambda path: changed(path, hosts=["a", "b"]),
        "run/result.json is damaged: hosts: it should have one element for each of the 1 ranks",
    ),
    "older than time": (
        lambda path: changed(path, staleness={str(10**12): 1}),
        "run/result.json is damaged: staleness: an update cannot be that stale",
    ),
    "an odd choice": (
        lambda path: changed(path, choices={"cut": 3}),
        "run/result.json is damaged: cut: input should be a valid string",
    ),
    "servers": (
        lambda path: changed(
            path, spec={"task": "quadratic", "strategy": "server", "strategy_options": {"servers": "x"}}
        ),
        "run/result.json is damaged: option servers of the strategy should be a whole number, got 'x'",
    ),
}


@pytest.mark.parametrize("case", RESULT)
def test_a_damaged_result_is_told_and_forbids_nothing(
    case: str, run: Path, typed: Callable[..., Answer]
) -> None:
    make, sentence = RESULT[case]
    (run / "result.json").write_text(make(run / "result.json"))
    answer = typed("show", "run")
    assert answer.err.startswith(f"error: {sentence}")
    assert (answer.err.count("\n"), answer.code) == (1, 1)
    with pytest.raises(ManyhandsError) as caught:
        mh.load(run)
    assert str(caught.value).startswith(sentence)
    answer = typed("train", "--resume", "run")
    assert answer.code == 0
    assert answer.err.startswith(sentence)
    assert answer.err.splitlines()[0].endswith("; continuing without it")
    assert mh.load(run).status == "finished"


def test_a_result_beyond_any_size_is_not_read(run: Path, typed: Callable[..., Answer]) -> None:
    os.truncate(run / "result.json", 10**11)  # nothing but a hole
    answer = typed("show", "run")
    assert answer.err == "error: cannot read run/result.json: it is larger than 100,000,000 bytes\n"


def test_a_result_of_another_run_is_not_this_ones(run: Path, typed: Callable[..., Answer]) -> None:
    """It once ended `--resume` with "already finished", and there was no model."""
    other = mh.train("quadratic", epochs=1, seed=7, threads=1, quiet=True, out=Path("other"))
    shutil.copy("other/result.json", run)
    (run / "model.safetensors").unlink()
    answer = typed("train", "--resume", "run")
    assert answer.code == 0
    sentence = f"run/result.json is of another run (quadratic, {other.id}); continuing without it"
    assert answer.err.splitlines()[0] == sentence
    assert "already finished" not in answer.err
    assert (run / "model.safetensors").is_file()
    assert mh.load(run).spec.seed == 0


CHOICES = {
    "[3]": "it is a list, not an object",
    '{"cut": 3}': "cut: input should be a valid string",
    '{"stages": [{"first": "x"}]}': "stages.0.first: input should be a valid integer",
    '{"offload": []}': "offload: input should be a valid dictionary",
    '{"sharded": 1}': "sharded: input should be a valid dictionary",
    DEEP: "it is nested too deeply",
}


@pytest.mark.parametrize("content", CHOICES, ids=lambda text: text[:12])
def test_choices_are_what_a_strategy_may_choose(
    content: str, run: Path, typed: Callable[..., Answer]
) -> None:
    (run / "choices.json").write_text(content)
    (run / "result.json").unlink()
    answer = typed("train", "--resume", "run")
    advice = "remove it to let the strategy choose again"
    assert answer.err == f"error: run/choices.json is damaged: {CHOICES[content]}; {advice}\n"
    assert answer.code == 1


def test_stages_must_follow_each_other(run: Path) -> None:
    stage = {"first": 0, "end": 2, "seconds": 0.1, "saved": 1, "outputs": 1, "parameters": 1}
    good = {"cut": "cut: ...", "stages": [stage, {**stage, "first": 2, "end": 3}], "of": "a later version"}
    (run / "choices.json").write_text(json.dumps(good))
    assert RunFolder(run).choices() == good
    (run / "choices.json").write_text(json.dumps({"stages": [stage, stage]}))
    with pytest.raises(ManyhandsError, match="its stages are not in order; remove it"):
        RunFolder(run).choices()


@pytest.mark.parametrize("content", ["[]", '{"cores": "many"}', DEEP], ids=["list", "type", "deep"])
def test_an_environment_is_one(content: str, run: Path) -> None:
    (run / "environment.json").write_text(content)
    with pytest.raises(ManyhandsError, match=r"^run/environment.json (is damaged|does not describe)"):
        RunFolder(run).environment()


@pytest.mark.parametrize(
    "line",
    [
        DEEP,
        DEEP_ENOUGH,
        "[]",
        '{"step": "1", "epoch": 0, "samples": 1, "loss": 1.0, "lr": 0.1, "seconds": 1.0}',
        '{"step": 1, "epoch": 0, "samples": 1, "loss": "x", "lr": 0.1, "seconds": 1.0}',
        '{"step": 1, "epoch": 0, "samples": -1, "loss": 1.0, "lr": 0.1, "seconds": 1.0}',
        '{"step": 1, "epoch": 0, "samples": 1, "loss": NaN, "lr": 0.1, "seconds": 1.0}',
        '{"step": 1, "epoch": 0, "samples": 1, "loss": 1, "lr": 0.1, "seconds": 1, "phases": {"a": "b"}}',
        f'{{"step": {LONG}, "epoch": 0, "samples": 1, "loss": 1.0, "lr": 0.1, "seconds": 1.0}}',
    ],
    ids=["deep", "deep enough", "list", "step", "loss", "negative", "nan", "phases", "long"],
)
def test_a_line_that_is_no_step_ends_the_journal(line: str, run: Path, typed: Callable[..., Answer]) -> None:
    path = run / "steps.jsonl"
    path.write_text(f"{path.read_text()}{line}\n")
    assert len(RunFolder(run).steps()) == 10
    assert typed("show", "run").code == 0


NAMES = ("spec.json", "result.json", "choices.json", "environment.json", "steps.jsonl", "spec.sig")
ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "link": (lambda path: path.symlink_to("../secret"), "it is a link, not a file"),
    "pipe": (os.mkfifo, "it is not a regular file"),
    "folder": (lambda path: path.mkdir(), "it is not a regular file"),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_file_is_neither_read_nor_written(
    kind: str, name: str, run: Path, typed: Callable[..., Answer]
) -> None:
    """A link in a stranger's folder may lead to any file of the user who resumes it."""
    make, reason = ODD[kind]
    secret = Path("secret")
    secret.write_text("untouched")
    (run / name).unlink(missing_ok=True)
    make(run / name)
    shown, resumed = typed("show", "run"), typed("train", "--resume", "run")
    if name in ("spec.json", "result.json", "steps.jsonl"):
        assert shown.err.startswith("error: ")
        assert reason in shown.err
    assert resumed.code == 2
    assert resumed.err.count("\n") == 1
    assert f"run/{name} is " in resumed.err or "run is not a run folder (spec.json: " in resumed.err
    assert secret.read_text() == "untouched"


@pytest.mark.parametrize("name", ["checkpoints", "logs", "tensorboard"])
def test_a_run_writes_to_its_own_folder_only(name: str, run: Path, typed: Callable[..., Answer]) -> None:
    Path("elsewhere").mkdir()
    Path("elsewhere/step-000000001.safetensors").write_text("somebody's")
    shutil.rmtree(run / name, ignore_errors=True)
    (run / name).symlink_to("../elsewhere")
    (run / "result.json").unlink()
    answer = typed("train", "--resume", "run")
    sentence = f"run/{name} is a link, and a run writes to its own folder only: remove it"
    assert (answer.code, answer.err) == (2, f"error: {sentence}\n")
    assert [path.name for path in Path("elsewhere").iterdir()] == ["step-000000001.safetensors"]


def test_steps_are_not_appended_to_what_a_link_leads_to(here: Path) -> None:
    Path("secret").write_text("untouched")
    folder = RunFolder(here / "run")
    folder.create()
    folder.steps_file.symlink_to("../secret")
    with pytest.raises(ManyhandsError, match=r"cannot write .*steps.jsonl: it is a link, not a file"):
        Journal(folder).on_start(None)  # type: ignore[arg-type]  # it opens the file, whatever starts
    assert Path("secret").read_text() == "untouched"


def test_a_file_is_not_written_through_a_link_in_waiting(here: Path) -> None:
    """The name of what is written beside a file can be guessed, and a link be put there before."""
    Path("secret").write_text("untouched")
    folder = RunFolder(here / "run")
    folder.create()
    Path(f"run/.spec.json.{os.getpid()}.partial").symlink_to("../secret")
    folder.write_spec(RunSpec.of(task="quadratic"))
    assert Path("secret").read_text() == "untouched"
    assert folder.spec() == RunSpec.of(task="quadratic")


STUDY = '{"event": "study", "at": "", "name": "s", "title": "s", "cells": []}'
EVENTS = {
    "[]": "it is a list, not an object",
    "3": "it is a number, not an object",
    DEEP: "it is nested too deeply",
    "{}": "event: field required",
    '{"event": 3}': "event: input should be a valid string",
    '{"event": "study"}': "name: field required",
    '{"event": "study", "name": "s", "title": "s", "cells": [3]}': "cells.0: input should be ",
    '{"event": "calibration", "at": "", "seconds": 0}': "seconds: input should be greater than 0",
    ELSEWHERE: "run: '../elsewhere' is not the name of a folder",
    '{"event": "finished", "cell": "a", "run": "/tmp"}': "run: '/tmp' is not the name of a folder",
    '{"event": "finished", "cell": [], "run": "a"}': "cell: input should be a valid string",
    '{"event": "repeated", "cell": "a", "run": "a"}': "noise: field required",
    '{"event": "over"}': "reason: field required",
}


@pytest.mark.parametrize("line", EVENTS, ids=lambda text: text[:60])
def test_a_journal_is_parsed_line_by_line(line: str, here: Path, typed: Callable[..., Answer]) -> None:
    Path("s").mkdir()
    Path("s/journal.jsonl").write_text(f"{STUDY}\n{line}\ntorn")
    answer = typed("report", "s")
    assert answer.err.startswith(f"error: s/journal.jsonl is damaged in line 2: {EVENTS[line]}")
    assert (answer.err.count("\n"), answer.code) == (1, 1)


def test_a_journal_that_is_a_link_is_left_alone(here: Path, typed: Callable[..., Answer]) -> None:
    Path("s").mkdir()
    Path("secret").write_text("untouched")
    Path("s/journal.jsonl").symlink_to("../secret")
    assert typed("report", "s").err == "error: cannot read s/journal.jsonl: it is a link, not a file\n"
    with pytest.raises(ManyhandsError, match="it is a link"), StudyFolder(Path("s")).writing():
        pass
    assert Path("secret").read_text() == "untouched"


def test_a_study_tidies_nothing_outside_its_folder(here: Path) -> None:
    Path("other/checkpoints").mkdir(parents=True)
    Path("other/model.safetensors").touch()
    Path("cell").symlink_to("other")
    tidy(Path("cell"))
    assert sorted(path.name for path in Path("other").iterdir()) == ["checkpoints", "model.safetensors"]
