"""Notices as log records: a host program routes them with its own handlers, and no line is shown twice."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import Answer
from manyhands.callbacks.background import BackgroundCallbacks
from manyhands.callbacks.base import Callback
from manyhands.records.record import StepRecord

HOST = """
import logging, sys
import manyhands as mh
from manyhands.transports.shm import leftovers

leftovers.sweep = lambda: ["an old file"]
logging.basicConfig(filename="host.log", format="%(name)s %(levelname)s %(message)s", level=logging.INFO)
mh.train("quadratic", epochs=1, threads=1, out=sys.argv[1], quiet="quiet" in sys.argv)
"""
REMOVED = "removed an old file, left behind by a run that was killed"


class Fails(Callback):
    name = "the page"

    def on_step(self, step: StepRecord) -> None:
        raise ConnectionError("no answer")


class Keeps(Callback):
    def __init__(self) -> None:
        self.notices: list[str] = []

    def on_notice(self, text: str) -> None:
        self.notices.append(text)


STEP = StepRecord(1, 0, 10, 0.5, 0.1, 0.1)
SENTENCE = "the page was switched off: ConnectionError: no answer; training continues without it"


def found(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, str]]:
    return [(record.name, record.levelname, record.getMessage()) for record in caplog.records]


def test_a_host_program_routes_notices_with_its_own_handler(tmp_path: Path) -> None:
    """Quiet, it has standard error for itself; else the progress display shows the same notice there."""
    for words in (["quiet"], ["loud"]):
        done = subprocess.run(
            [sys.executable, "-c", HOST, words[0], *words],
            cwd=tmp_path, capture_output=True, text=True, timeout=240, check=True,
        )  # fmt: skip
        assert (tmp_path / "host.log").read_text().splitlines() == [f"manyhands.run INFO {REMOVED}"]
        assert done.stderr.count(REMOVED) == (0 if words == ["quiet"] else 1)
        assert done.stdout == ""
        (tmp_path / "host.log").unlink()


def test_notices_and_warnings_have_their_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "manyhands")
    keeps = Keeps()
    with BackgroundCallbacks([keeps]) as callbacks:
        callbacks.on_notice("starting")
        callbacks.on_warning("worker 1 is lost")
    assert found(caplog) == [
        ("manyhands.run", "INFO", "starting"),
        ("manyhands.run", "WARNING", "worker 1 is lost"),
    ]
    assert keeps.notices == ["starting", "worker 1 is lost"]


def test_a_callback_that_fails_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with BackgroundCallbacks([Keeps(), Fails()]) as callbacks:
        callbacks.on_step(STEP)
        wait_for(lambda: bool(caplog.records))
    assert found(caplog) == [("manyhands.run", "WARNING", SENTENCE)]
    caplog.clear()
    with BackgroundCallbacks([Fails()]) as callbacks:
        callbacks.on_step(STEP)
    assert found(caplog) == [("manyhands.callbacks", "WARNING", SENTENCE)]  # no other callback shows it


def test_a_handler_that_blocks_does_not_stop_the_run(blocking: logging.Handler) -> None:
    since = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GRACE", "EXTRA_GRACE", "MIN_GRACE"):
            patch.setattr(f"manyhands.callbacks.background.{name}", 0.1)
        with BackgroundCallbacks([]) as callbacks:
            callbacks.on_warning("worker 1 is lost")
    assert time.monotonic() - since < 5.0


def test_nothing_is_printed_without_a_handler(tmp_path: Path) -> None:
    code = (
        "import manyhands, logging; from manyhands.callbacks.background import BackgroundCallbacks\n"
        "with BackgroundCallbacks([]) as callbacks: callbacks.on_warning('worker 1 is lost')\n"
        "assert [type(each) for each in logging.getLogger('manyhands').handlers] == [logging.NullHandler]\n"
        "assert not logging.getLogger().handlers"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_the_command_line_shows_each_line_once(
    typed: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notice by its progress display; a warning that no display is left to show by its own handler."""
    monkeypatch.setattr("manyhands.transports.shm.leftovers.sweep", lambda: ["an old file"])
    answer = typed("train", "quadratic", "--epochs", "1")
    assert answer.err.count(REMOVED) == 1
    monkeypatch.setattr("manyhands.callbacks.tracking.member", lambda name: Fails())
    answer = typed("train", "quadratic", "--epochs", "1", "--quiet", "--track", "tensorboard")
    assert (answer.code, answer.err) == (0, f"{SENTENCE}\n")
    answer = typed("train", "quadratic", "--epochs", "1", "--track", "tensorboard")
    assert answer.err.count(SENTENCE) == 1


def test_the_command_line_leaves_no_handler_behind(typed: Callable[..., Answer]) -> None:
    package, callbacks = logging.getLogger("manyhands"), logging.getLogger("manyhands.callbacks")
    typed("list", "tasks")
    assert (package.propagate, callbacks.handlers) == (True, [])


@pytest.fixture
def blocking() -> Iterator[logging.Handler]:
    """A handler of a host program that does not come back before the test is over."""
    release, handler = threading.Event(), logging.Handler()
    handler.emit = lambda record: release.wait() and None  # type: ignore[method-assign]
    logging.getLogger("manyhands").addHandler(handler)
    yield handler
    release.set()
    logging.getLogger("manyhands").removeHandler(handler)


def wait_for(ready: Callable[[], bool]) -> None:
    until = time.monotonic() + 10.0
    while not ready() and time.monotonic() < until:
        time.sleep(0.01)
    assert ready()
