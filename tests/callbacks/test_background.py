"""Law 12: a callback cannot end a run, whether it raises, blocks or is slow."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhands.callbacks.base import Callback
from manyhands.core.errors import StorageError
from manyhands.records.record import RunRecord, Start, StepRecord
from manyhands.records.run_folder import RunFolder
from manyhands.records.spec import RunSpec
from manyhands.runs.defaults import fill_in
from manyhands.runs.train import run

EVENTS = ("on_start", "on_step", "on_end", "on_notice", "close")


class Hears(Callback):
    """Notes every event, and does something at one kind of them."""

    name = "the page"

    def __init__(self, at: str = "", does: Callable[[], object] = list) -> None:
        self.heard: list[str] = []
        self.notices: list[str] = []
        self._at, self._does = at, does

    def on_start(self, start: Start) -> None:
        self._hear("on_start")

    def on_step(self, step: StepRecord) -> None:
        self._hear("on_step")

    def on_end(self, record: RunRecord) -> None:
        self._hear("on_end")

    def on_notice(self, text: str) -> None:
        self.notices.append(text)
        self._hear("on_notice")

    def close(self) -> None:
        self._hear("close")

    def _hear(self, event: str) -> None:
        self.heard.append(event)
        if event == self._at:
            self._does()


def fail() -> None:
    raise ConnectionError("no answer\nat all")


def run_with(*callbacks: Callback, folder: Path, **settings: Any) -> RunRecord:
    """Ten steps, with a notice before them."""
    spec = RunSpec.of(task="quadratic", **fill_in({"epochs": 1, "threads": 1, **settings}))
    return run(spec, out=folder, callbacks=callbacks)


@pytest.fixture(autouse=True)
def _something_to_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.transports.shm.leftovers.sweep", lambda: ["an old file"])


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience for tests."""
    for name, seconds in (("GRACE", 0.2), ("EXTRA_GRACE", 0.1), ("MIN_GRACE", 0.1)):
        monkeypatch.setattr(f"manyhands.callbacks.background.{name}", seconds)


@pytest.fixture
def stuck() -> Iterator[Callable[[], object]]:
    """What does not come back before the test is over."""
    release = threading.Event()
    yield release.wait
    release.set()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """The same run without callbacks."""
    spec = RunSpec.of(task="quadratic", epochs=1, threads=1)
    return run(spec, out=tmp_path_factory.mktemp("expected") / "run")


@pytest.mark.parametrize("event", EVENTS)
def test_one_that_raises_is_switched_off_and_the_others_say_so(
    here: Path, expected: RunRecord, event: str
) -> None:
    good, bad = Hears(), Hears(event, fail)
    record = run_with(good, bad, folder=here / "run")
    assert (record.status, record.loss) == ("finished", expected.loss)
    assert len(RunFolder(here / "run").steps()) == 10
    then = "the run does not need it" if event in ("on_end", "close") else "training continues without it"
    sentence = f"the page was switched off: ConnectionError: no answer; {then}"
    assert [text for text in good.notices if "old file" not in text] == [sentence]
    events = [each for each in good.heard if each != "on_notice"]
    assert events == ["on_start", *["on_step"] * 10, "on_end", "close"]
    after = bad.heard[bad.heard.index(event) + 1 :]
    assert after == ([] if event == "close" else ["close"])  # once, to give back what it holds


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("event", EVENTS)
def test_one_that_blocks_is_left_behind(
    here: Path, expected: RunRecord, stuck: Callable[[], object], event: str
) -> None:
    good, bad = Hears(), Hears(event, stuck)
    since = time.monotonic()
    record = run_with(good, bad, folder=here / "run")
    assert time.monotonic() - since < 20.0
    assert (record.status, record.loss) == ("finished", expected.loss)
    (sentence,) = [text for text in good.notices if "old file" not in text]
    assert re.match(r"the page was left behind: it has not answered for \d+ s; what it has", sentence)
    assert good.heard.count("on_step") == 10
    assert bad.heard[-1] == event


def test_several_workers_do_not_end_either(here: Path) -> None:
    """It once killed all workers: the supervisor called the callbacks itself."""
    good, bad = Hears(), Hears("on_step", fail)
    record = run_with(good, bad, folder=here / "run", workers=2)
    assert (record.status, record.spec.workers) == ("finished", 2)
    assert sum("the page was switched off" in text for text in good.notices) == 1
    assert good.heard.count("on_step") == record.steps


@pytest.mark.usefixtures("brief")
def test_several_workers_do_not_wait(here: Path, stuck: Callable[[], object]) -> None:
    good, bad = Hears(), Hears("on_start", stuck)
    assert run_with(good, bad, folder=here / "run", workers=2).status == "finished"
    assert any(text.startswith("the page was left behind") for text in good.notices)


def test_a_slow_one_may_miss_steps_and_nothing_else(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.callbacks.background.MAX_STEPS", 3)
    slow = Hears("on_step", lambda: time.sleep(0.02))
    slow.name = "the slow page"
    good = Hears()
    run_with(good, slow, folder=here / "run", epochs=20)
    assert "the slow page does not keep up: it misses steps" in good.notices
    assert 1 <= slow.heard.count("on_step") < 200
    assert (slow.heard[:2], slow.heard[-2:]) == (["on_notice", "on_start"], ["on_end", "close"])


def test_what_a_slow_one_has_not_heard_of_does_not_hold_up_the_end(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps that wait are left out, so that it still hears how the run ended."""
    monkeypatch.setattr("manyhands.callbacks.background.GRACE", 0.2)
    slow = Hears("on_step", lambda: time.sleep(0.1))
    since = time.monotonic()
    run_with(slow, folder=here / "run", epochs=20)
    assert time.monotonic() - since < 15.0  # 200 steps would be 20 s
    assert slow.heard[-2:] == ["on_end", "close"]


def test_one_that_leaves_the_process_is_switched_off_too(here: Path) -> None:
    good = Hears()
    run_with(good, Hears("on_start", lambda: sys.exit(3)), folder=here / "run")
    assert "the page was switched off: SystemExit: 3; training continues without it" in good.notices


@pytest.mark.usefixtures("brief")
def test_one_that_was_left_behind_is_not_heard_of_again(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its error comes when all is over, and would be a second sentence."""
    release = threading.Event()

    def late() -> None:
        release.wait()
        fail()

    run_with(Hears("on_start", late), folder=here / "run")
    release.set()
    for thread in threading.enumerate():
        if thread.name == "callback the page":
            thread.join(10.0)
    (sentence,) = caplog.messages
    assert sentence.startswith("the page was left behind: ")


def test_a_second_ctrl_c_does_not_wait_for_them(stuck: Callable[[], object]) -> None:
    from manyhands.callbacks.background import GRACE, BackgroundCallbacks

    def impatient() -> None:
        with BackgroundCallbacks([Hears("on_notice", stuck)]) as callbacks:
            callbacks.on_notice("here we are")
            raise KeyboardInterrupt

    since = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        impatient()
    assert time.monotonic() - since < GRACE


def test_a_full_disk_still_ends_the_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal does not run in the background: a step that cannot be written down must not be made."""

    def full(self: object, step: StepRecord) -> None:
        raise StorageError("cannot write steps.jsonl: no space left on device")

    monkeypatch.setattr("manyhands.callbacks.journal.Journal.on_step", full)
    good = Hears()
    with pytest.raises(StorageError, match="no space left"):
        run_with(good, folder=here / "run")
    assert good.heard[-1] == "close"


def test_what_a_person_sees_is_in_order(typed: Callable[..., Any]) -> None:
    """All of it is there before the command ends, the error last."""
    lines = typed("train", "quadratic", "--epochs", "1", "--track", "tensorboard").err.splitlines()
    assert lines[0] == "removed an old file, left behind by a run that was killed"
    assert lines[1].startswith("quadratic · ")
    assert lines[-1].startswith("next: manyhands show ")
    lines = typed("train", "quadratic", "--epochs", "1", "--lr", "1e9").err.splitlines()
    assert lines[-1].startswith("error: ")
    assert lines[1].startswith("quadratic · ")


@pytest.mark.slow
def test_a_full_pipe_does_not_stop_the_training(tmp_path: Path) -> None:
    """Nor the process from ending: standard error is full from the start and stays so."""
    code = (
        "import sys, manyhands as mh; from manyhands.callbacks import background\n"
        "background.GRACE = background.EXTRA_GRACE = background.MIN_GRACE = 0.2\n"
        "mh.train('quadratic', epochs=1, out=sys.argv[1])"
    )
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, bytes(4096))
    os.set_blocking(write, True)
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stderr=write, cwd=tmp_path)
    try:
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()
        os.close(read)
        os.close(write)
    record = RunFolder(tmp_path / "run").record()
    assert record is not None
    assert record.status == "finished"
