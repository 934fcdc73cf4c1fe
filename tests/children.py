"""`manyhands ...` in a process of its own, which can be killed: forked from one that has torch already."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from transports.groups import context

PATIENCE = 60.0


def act(words: list[str], folder: Path, environment: dict[str, str], said: Path) -> None:
    """Be the command line, as its entry point is."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    from manyhands import cli

    sys.exit(cli.answer(words))


class Child:
    """One command line under way."""

    def __init__(self, *words: str, folder: Path) -> None:
        self._said = folder / "said.txt"
        arguments = (list(words), folder, dict(os.environ), self._said)
        self._process = context.Process(target=act, args=arguments)
        self._process.start()

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Look again and again; it must not end before that."""
        deadline = time.monotonic() + PATIENCE
        while not reached():
            assert self._process.is_alive() or reached(), self.said
            assert time.monotonic() < deadline, f"not reached: {self.said}"
            time.sleep(0.002)

    def send(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def end(self) -> int:
        """Its exit code, minus the signal that killed it."""
        self._process.join(PATIENCE)
        code = self._process.exitcode
        assert code is not None, f"it did not end: {self.said}"
        self._process.close()
        return code

    def kill(self) -> None:
        """Without warning."""
        self.send(signal.SIGKILL)
        assert self.end() == -signal.SIGKILL

    @property
    def said(self) -> str:
        return self._said.read_text() if self._said.exists() else ""


def warm(folder: Path) -> None:
    """Start what these are forked from: it stays for the next one."""
    assert Child("--version", folder=folder).end() == 0
