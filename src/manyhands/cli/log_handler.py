"""The command line's own handler for the log: warnings that no progress display is left to show."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from typing import final

from manyhands.callbacks.log import CALLBACKS
from manyhands.core import formatting

WAIT = 0.5  # seconds for a line: standard error may be a pipe that is full


@final
class StandardError(logging.Handler):
    """Prints each message on standard error, in a thread: a pipe that is full must not stop a run."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message, or give up after a moment."""
        line = formatting.printed(record.getMessage())
        thread = threading.Thread(target=_print, args=(line,), name="standard error", daemon=True)
        thread.start()
        thread.join(WAIT)


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Show, while a command runs, what the progress display cannot show.

    Nothing is passed on to handlers that a task's file may configure: each line is shown once.
    """
    package, handler = logging.getLogger("manyhands"), StandardError(logging.WARNING)
    propagated, package.propagate = package.propagate, False
    CALLBACKS.addHandler(handler)
    try:
        yield
    finally:
        CALLBACKS.removeHandler(handler)
        package.propagate = propagated


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # standard error is closed
        print(line, file=sys.stderr, flush=True)
