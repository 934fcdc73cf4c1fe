"""The log handler of the command line: prints warnings that no progress display can show."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from typing import final

from manyhands.callbacks.log import CALLBACKS
from manyhands.core import formatting

WAIT = 0.5  # seconds to wait for a line to be printed: standard error may be a full pipe


@final
class StandardError(logging.Handler):
    """Prints each message on standard error, in a thread: a full pipe must not stop a run."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message, or give up after a moment."""
        line = formatting.printed(record.getMessage())
        thread = threading.Thread(target=_print, args=(line,), name="standard error", daemon=True)
        thread.start()
        thread.join(WAIT)


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """While a command runs, print warnings that the progress display cannot show.

    They do not propagate to handlers that a task file may configure: each line is printed once.
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
