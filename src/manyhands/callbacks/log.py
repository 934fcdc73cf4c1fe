"""Notices as records of Python's `logging`, for a host program that routes them with handlers of its own.

`manyhands.run`        what the progress display shows too: notices, and warnings such as a lost worker
`manyhands.callbacks`  warnings about callbacks that no other callback was left to show

The library adds no handler but a NullHandler (in `manyhands/__init__.py`). The command line shows the second
kind with a handler of its own (`cli/log_handler.py`); the first kind its progress display has shown already.
"""

from __future__ import annotations

import logging

from manyhands.callbacks.base import Callback

RUN = logging.getLogger("manyhands.run")
CALLBACKS = logging.getLogger("manyhands.callbacks")


class NoticeLog(Callback):
    """Logs notices. It runs in a background thread, so that a handler that blocks does not stop a run."""

    name = "the log"

    def on_notice(self, text: str) -> None:
        RUN.info(text)

    def on_warning(self, text: str) -> None:
        """Called with a notice that is a warning."""
        RUN.warning(text)

    def on_unseen_warning(self, text: str) -> None:
        """Called with a warning about a callback where no other callback is left."""
        CALLBACKS.warning(text)
