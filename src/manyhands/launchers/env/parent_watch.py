"""A worker of torchrun ends soon after torchrun does: a thread watches whether its parent is still alive.

torchrun ends its workers when it is asked to end, but not when it is killed; they would train on unseen.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, final

from manyhands.launchers.env.rendezvous import ClusterEnvironment

CHECK = 0.5  # seconds between checks
FIRST_RANK_ENDS = 2.0  # seconds that other ranks wait: one prints the message for the host, and is not lost
AGENT = "TORCHELASTIC_RUN_ID"  # set by torchrun's agent; a shell that sets RANK and so on may exit before us
# Processes that adopt orphans. Only these names: a parent with any other name is a real parent.
REAPERS = ("systemd", "init", "tini", "dumb-init", "docker-init")


@final
class ParentWatch:
    """Starts when it is made; calls `cleanup` before it ends the process."""

    def __init__(self, cluster: ClusterEnvironment, environ: Mapping[str, str]) -> None:
        self.cleanup: Callable[[], None] = _no_cleanup
        self._cluster, self._parent = cluster, os.getppid()
        self._enabled = cluster.starter == "torchrun" and AGENT in environ
        self._late = (
            self._enabled and parent_name() in REAPERS
        )  # torchrun was killed while this process started
        if self._enabled:
            threading.Thread(target=self._watch, name="manyhands-parent", daemon=True).start()

    def is_orphan(self) -> bool:
        """Whether torchrun is gone."""
        return self._late or (self._enabled and os.getppid() != self._parent)

    def _watch(self) -> NoReturn:
        while not self.is_orphan():
            time.sleep(CHECK)
        try:
            self._print_message()
            self.cleanup()
        finally:  # stderr may have been closed with torchrun
            os._exit(1)

    def _print_message(self) -> None:
        if self._cluster.local_rank == 0:
            pid = "" if self._late else f" (pid {self._parent})"
            print(f"error: {message(pid)}", file=sys.stderr, flush=True)
        else:
            time.sleep(FIRST_RANK_ENDS)


def message(pid: str = "") -> str:
    """The message that is printed once per host."""
    return f"torchrun{pid}, which started this worker, was killed or crashed; its workers end, too"


def parent_name() -> str:
    """The name of this process's parent, if the system tells it."""
    with suppress(OSError):
        return Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    return ""


def _no_cleanup() -> None:
    """There is nothing to clean up."""
