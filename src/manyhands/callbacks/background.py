"""Callbacks in background threads, so that none of them can end or stop a run (law 12).

    the run ── event ──▶ [ queue ] ── thread ──▶ progress bar
                   ├───▶ [ queue ] ── thread ──▶ mlflow        raises: switched off, and the others say so
                   ├───▶ [ queue ] ── thread ──▶ a user's own  blocks: misses steps, abandoned at the end
                   └───▶ [ queue ] ── thread ──▶ the log

The run puts an event into the queues and goes on. Each callback hears its events in order. The journal of
steps is not one of them: a step that cannot be written down must not be made, so a full disk ends the run.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, final

from manyhands.callbacks.base import Callback
from manyhands.callbacks.log import NoticeLog
from manyhands.core.errors import ManyhandsError
from manyhands.records.record import RunRecord, Start, StepRecord

MAX_STEPS = 10_000  # steps that wait in a queue; a callback that is slower than that misses some
TICK = 0.05  # seconds in which steps gather: waking a thread at each would cost the trainer more
GRACE = 3.0  # seconds that the end of a run waits for callbacks ...
EXTRA_GRACE = 2.0  # ... and then once more, without the steps that they have not heard of
MIN_GRACE = 0.5  # seconds for each callback, however long the others took
MAX_REASON = 300  # characters of an error's text


@final
class BackgroundCallbacks:
    """All callbacks of one run, and the log: as one callback that neither raises nor blocks."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        # the null callback needs no thread
        self._callbacks = [_Background(one, self) for one in callbacks if type(one) is not Callback]
        self._log = _Background(NoticeLog(), self)
        self._closed = self._enough = False

    @classmethod
    def of(cls, callbacks: Sequence[Callback] | BackgroundCallbacks) -> BackgroundCallbacks:
        """The callbacks in background threads; those that are there already stay as they are."""
        return callbacks if isinstance(callbacks, BackgroundCallbacks) else cls(callbacks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(patient=kind is not KeyboardInterrupt)

    def receive(self, message: tuple[str, Any]) -> None:
        """An event that rank 0 has sent through its relay: the name of a method, and its argument."""
        event, argument = message
        getattr(self, event)(argument)

    def on_waiting(self, text: str) -> None:
        self._put_all("on_waiting", text)

    def on_start(self, start: Start) -> None:
        self._put_all("on_start", start)

    def on_step(self, step: StepRecord) -> None:
        for callback in self._callbacks:
            callback.put_step(step)

    def on_end(self, record: RunRecord) -> None:
        self._put_all("on_end", record)

    def on_notice(self, text: str) -> None:
        self._put_all("on_notice", text)
        self._log.put("on_notice", text)

    def on_warning(self, text: str) -> None:
        """A notice that the log has as a warning."""
        self._put_all("on_notice", text)
        self._log.put("on_warning", text)

    def close(self, *, patient: bool = True) -> None:
        """Let all finish, within seconds: the log last, and before it the first, which a person sees."""
        if self._closed:
            return
        self._closed = True
        until, left = time.monotonic() + GRACE if patient else 0.0, [self._log, *self._callbacks]
        try:
            while left:
                left.pop().close(until)
        finally:  # Ctrl-C: wait no longer, but a terminal gets its cursor back
            while left:
                left.pop().close(0.0)

    @property
    def enough(self) -> bool:
        """Whether a callback has asked for the end of the run."""
        return self._enough

    def stop_for(self, one: _Background) -> None:
        """One of them asks for the end of the run."""
        if not self._enough:
            self._enough = True
            self.on_notice(f"{one.name} asks to stop: the run ends after the current step")

    def warn_about(self, one: _Background, text: str) -> None:
        """Tell the other callbacks, and the log, about one of them."""
        others = [other for other in self._callbacks if other is not one and other.active]
        for other in others:
            other.put("on_notice", text)
        if one is not self._log:
            self._log.put("on_warning" if others else "on_unseen_warning", text)

    def _put_all(self, event: str, argument: Any) -> None:
        for callback in self._callbacks:
            callback.put(event, argument)


@final
class _Background:
    """One callback: a queue, and the thread that empties it, which starts with the first event."""

    def __init__(self, callback: Callback, others: BackgroundCallbacks) -> None:
        self.name = getattr(callback, "name", type(callback).__name__)
        self.active = True  # until it is switched off or closed
        self._callback, self._others = callback, others
        self._calls: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._wake, self._done = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._since: float | None = None  # when the call began that it is in
        self._event = ""  # which it is
        self._misses_steps = self._in_a_hurry = self._abandoned = False

    def put(self, event: str, *arguments: Any) -> None:
        """Queue an event that is never left out: these are few."""
        if not self.active:
            return
        self._calls.append((event, arguments))
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"callback {self.name}", daemon=True)
            self._thread.start()

    def put_step(self, step: StepRecord) -> None:
        """Queue a step, if there is room; one with an evaluation is never left out."""
        if self._thread is None:
            self.put("on_step", step)
        elif len(self._calls) < MAX_STEPS or step.metric is not None:
            self._calls.append(("on_step", (step,)))
        elif not self._misses_steps:
            self._misses_steps = True
            self._others.warn_about(self, f"{self.name} does not keep up: it misses steps")

    def close(self, until: float) -> None:
        """Queue its last call and wait for it; a thread that does not come back ends with the process."""
        if self._thread is None and type(self._callback).close is Callback.close:
            self.active = False  # it has heard nothing and holds nothing
            return
        self.put("close")
        self.active = False
        if self._done.wait(max(MIN_GRACE, until - time.monotonic())):
            return
        self._in_a_hurry = True
        if not self._done.wait(max(MIN_GRACE, until + EXTRA_GRACE - time.monotonic())):
            self._abandoned = True  # what it does from now on is of no interest
            self._others.warn_about(self, f"{self.name} was left behind: {self._how_late()}")

    def _how_late(self) -> str:
        since = self._since
        if since is None:
            return "it did not keep up; what it has of this run is not complete"
        silent = time.monotonic() - since
        return f"it has not answered for {silent:.0f} s; what it has of this run is not complete"

    def _work(self) -> None:
        """Make calls until it is closed or fails."""
        try:
            while self._empty_queue():
                self._wake.wait(TICK)
                self._wake.clear()
        except BaseException as error:  # noqa: BLE001 (whatever it is, SystemExit included, the run goes on)
            self.active = False
            self._since = None
            over = self._event in ("on_end", "close")
            then = "the run does not need it" if over else "training continues without it"
            if not self._abandoned:
                self._others.warn_about(self, f"{self.name} was switched off: {reason_of(error)}; {then}")
            self._calls.clear()
            if self._event != "close":
                with contextlib.suppress(BaseException):  # one sentence is enough
                    self._callback.close()
        finally:
            self._done.set()

    def _empty_queue(self) -> bool:
        """Make the calls that wait; return whether there may be more."""
        while self._calls:
            event, arguments = self._calls.popleft()
            if event == "on_step" and self._in_a_hurry:
                continue
            self._since, self._event = time.monotonic(), event
            answers = [getattr(self._callback, event)(*arguments)]
            if event == "on_step" and arguments[0].metric is not None:
                answers.append(self._callback.on_evaluation(*arguments))
            self._since = None
            if "stop" in answers:
                self._others.stop_for(self)
            if event == "close":
                return False
        return True


def reason_of(error: BaseException) -> str:
    """`OSError: no space left on device`, in one line of limited length."""
    lines = str(error).strip().splitlines()
    first = lines[0] if lines else ""
    kind = "" if isinstance(error, ManyhandsError) else type(error).__name__
    text = ": ".join(part for part in (kind, first) if part)
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]} ..."
