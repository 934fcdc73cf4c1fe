"""Who follows a run cannot end it (law 12): each follower has a thread of its own and a queue that fills up.

    the run ── hear ──▶ [ queue ] ── thread ──▶ progress bar
                  ├───▶ [ queue ] ── thread ──▶ mlflow          raises: switched off, and the others say so
                  └───▶ [ queue ] ── thread ──▶ anybody's own   blocks: not told all steps, left at the end

The run puts an event into the queues and goes on. Each follower hears its events in order. The journal is no
follower: a step that cannot be written down must not be made, so a full disk still ends the run.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, final

from manyhands.callbacks.base import Callback
from manyhands.core.errors import ManyhandsError
from manyhands.records.record import RunRecord, Start, StepRecord

STEPS = 10_000  # that wait for a follower; more are left out
TICK = 0.05  # seconds in which steps gather: to wake a thread at each would cost the trainer more
SOON = 3.0  # seconds that the end waits for followers ...
LATER = 2.0  # ... and then once more, without the steps that they have not heard of
LEAST = 0.5  # seconds for each of them, however long the others took
LONGEST = 300  # characters of a reason


@final
class BackgroundCallbacks:
    """All who follow one run, as one observer that neither raises nor blocks."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        # one that hears nothing needs no thread
        self._all = [_BackgroundCallback(one, self) for one in callbacks if type(one) is not Callback]
        self._closed = False

    @classmethod
    def of(cls, callbacks: Sequence[Callback] | BackgroundCallbacks) -> BackgroundCallbacks:
        """These, or those who follow already."""
        return callbacks if isinstance(callbacks, BackgroundCallbacks) else cls(callbacks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(patient=kind is not KeyboardInterrupt)

    def hear(self, message: tuple[str, Any]) -> None:
        """What rank 0 tells: an event's name, and what it is about."""
        event, what = message
        getattr(self, event)(what)

    def started(self, start: Start) -> None:
        """Passed on."""
        self._tell("started", start)

    def stepped(self, step: StepRecord) -> None:
        """Passed on to whoever keeps up."""
        for one in self._all:
            one.step(step)

    def ended(self, record: RunRecord) -> None:
        """Passed on."""
        self._tell("ended", record)

    def notice(self, text: str) -> None:
        """Passed on."""
        self._tell("notice", text)

    def close(self, *, patient: bool = True) -> None:
        """Let all finish, within a few seconds; the first one last, since that is what a person sees."""
        if self._closed:
            return
        self._closed = True
        until, left = time.monotonic() + SOON if patient else 0.0, list(self._all)
        try:
            while left:
                left.pop().close(until)
        finally:  # Ctrl-C: no more patience, but a terminal gets its cursor back
            while left:
                left.pop().close(0.0)

    def told_by(self, one: _BackgroundCallback, text: str) -> None:
        """A word about one of them, for the others; aloud where there are none."""
        others = [other for other in self._all if other is not one and other.listens]
        for other in others:
            other.put("notice", text)
        if not others:
            aloud(text)

    def _tell(self, event: str, what: Any) -> None:
        for one in self._all:
            one.put(event, what)


@final
class _BackgroundCallback:
    """One of them: a queue, and the thread that empties it, begun with the first event."""

    def __init__(self, callback: Callback, others: BackgroundCallbacks) -> None:
        self.name = getattr(callback, "name", type(callback).__name__)
        self.listens = True  # until it is switched off or closed
        self._observer, self._others = callback, others
        self._calls: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._wake, self._done = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._since: float | None = None  # when the call began that it is in
        self._event = ""  # which it is
        self._late = self._in_a_hurry = self._left = False

    def put(self, event: str, *what: Any) -> None:
        """What is never left out, since it comes seldom."""
        if not self.listens:
            return
        self._calls.append((event, what))
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"follower {self.name}", daemon=True)
            self._thread.start()

    def step(self, step: StepRecord) -> None:
        """A step, if it keeps up; evaluations come seldom, too."""
        if self._thread is None:  # somebody who begins in the middle
            self.put("stepped", step)
        elif len(self._calls) < STEPS or step.metric is not None:
            self._calls.append(("stepped", (step,)))
        elif not self._late:
            self._late = True
            self._others.told_by(self, f"{self.name} does not keep up: it is not told of every step")

    def close(self, until: float) -> None:
        """Its last call; what does not come back is left, and ends with the process."""
        self.put("close")
        self.listens = False
        if self._done.wait(max(LEAST, until - time.monotonic())):
            return
        self._in_a_hurry = True
        if not self._done.wait(max(LEAST, until + LATER - time.monotonic())):
            self._left = True  # what it does from now on is of no interest
            self._others.told_by(self, f"{self.name} was left behind: {self._how_late()}")

    def _how_late(self) -> str:
        since = self._since
        if since is None:
            return "it did not keep up; what it has of this run is not complete"
        silent = time.monotonic() - since
        return f"it has not answered for {silent:.0f} s; what it has of this run is not complete"

    def _work(self) -> None:
        """Until it is closed or fails."""
        try:
            while self._take():
                self._wake.wait(TICK)
                self._wake.clear()
        except BaseException as error:  # noqa: BLE001 (whatever it is, SystemExit included, the run goes on)
            self.listens = False
            self._since = None
            over = self._event in ("ended", "close")
            goes_on = "the run does not need it" if over else "training goes on without it"
            if not self._left:
                self._others.told_by(self, f"{self.name} was switched off: {reason_of(error)}; {goes_on}")
            self._calls.clear()
            if self._event != "close":
                with contextlib.suppress(BaseException):  # one sentence is enough
                    self._observer.close()
        finally:
            self._done.set()

    def _take(self) -> bool:
        """Everything that waits; whether there is more to come."""
        while self._calls:
            event, what = self._calls.popleft()
            if event == "stepped" and self._in_a_hurry:
                continue
            self._since, self._event = time.monotonic(), event
            getattr(self._observer, event)(*what)
            self._since = None
            if event == "close":
                return False
        return True


def reason_of(error: BaseException) -> str:
    """`OSError: no space left on device`, in one line of bearable length."""
    lines = str(error).strip().splitlines()
    said = lines[0] if lines else ""
    kind = "" if isinstance(error, ManyhandsError) else type(error).__name__
    text = ": ".join(part for part in (kind, said) if part)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def aloud(text: str) -> None:
    """On standard error, in a thread: that may block or be gone, too."""

    def say() -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody is left to be told
            print(text, file=sys.stderr, flush=True)

    thread = threading.Thread(target=say, name="follower aloud", daemon=True)
    thread.start()
    thread.join(LEAST)
