"""A worker of torchrun ends soon after torchrun does: a thread looks whose child this process is.

torchrun ends its workers when it is asked to end, but not when it is killed; they would train on, unseen.
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

from manyhands.launchers.env.rendezvous import StarterInfo

LOOK = 0.5  # seconds between looks
LEADER_FIRST = 2.0  # seconds the others wait: one speaks for all of a host, and is not to be called lost
AGENT = "TORCHELASTIC_RUN_ID"  # set by torchrun's agent; who sets only RANK and so on may leave before us
# Who takes in a process whose parent has died. Not everybody who may: a parent of another name is a parent.
REAPERS = ("systemd", "init", "tini", "dumb-init", "docker-init")


@final
class OrphanWatch:
    """Begins when it is made; `farewell` is called before the process ends."""

    def __init__(self, found: StarterInfo, environ: Mapping[str, str]) -> None:
        self.farewell: Callable[[], None] = _nothing
        self._found, self._parent = found, os.getppid()
        self._watches = found.starter == "torchrun" and AGENT in environ
        self._late = self._watches and parents_name() in REAPERS  # it was killed while this process started
        if self._watches:
            threading.Thread(target=self._look, name="manyhands-parent", daemon=True).start()

    def is_orphan(self) -> bool:
        """Whether torchrun is gone."""
        return self._late or (self._watches and os.getppid() != self._parent)

    def _look(self) -> NoReturn:
        while not self.is_orphan():
            time.sleep(LOOK)
        try:
            self._speak()
            self.farewell()
        finally:  # whatever stderr was, it may have gone with torchrun
            os._exit(1)

    def _speak(self) -> None:
        if self._found.local_rank == 0:
            which = "" if self._late else f" (pid {self._parent})"
            print(f"error: {sentence(which)}", file=sys.stderr, flush=True)
        else:
            time.sleep(LEADER_FIRST)


def sentence(which: str = "") -> str:
    """What is said once per host."""
    return f"torchrun{which}, which started this worker, is gone (killed or crashed): the workers end, too"


def parents_name() -> str:
    """What the system calls this process's parent now, where it tells."""
    with suppress(OSError):
        return Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    return ""


def _nothing() -> None:
    """There is nothing to clean up."""
