"""`manyhands ...` in a child process that can be killed, forked from a process that has imported torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from transports.groups import context

TIMEOUT = 60.0  # seconds


def run(words: list[str], folder: Path, environment: dict[str, str], output: Path) -> None:
    """Run the command line, as its entry point does."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    from manyhands import cli

    sys.exit(cli.answer(words))


class Child:
    """A running command line."""

    def __init__(self, *words: str, folder: Path) -> None:
        self._output = folder / "output.txt"
        arguments = (list(words), folder, dict(os.environ), self._output)
        self._process = context.Process(target=run, args=arguments)
        self._process.start()

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait for a condition; the process must not end before that."""
        deadline = time.monotonic() + TIMEOUT
        while not reached():
            assert self._process.is_alive() or reached(), self.output
            assert time.monotonic() < deadline, f"not reached: {self.output}"
            time.sleep(0.002)

    def send(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def end(self) -> int:
        """Wait for its end; its exit code, or the negative number of the signal that killed it."""
        self._process.join(TIMEOUT)
        code = self._process.exitcode
        assert code is not None, f"it did not end: {self.output}"
        self._process.close()
        return code

    def kill(self) -> None:
        """Send SIGKILL, and wait for its end."""
        self.send(signal.SIGKILL)
        assert self.end() == -signal.SIGKILL

    @property
    def output(self) -> str:
        return self._output.read_text() if self._output.exists() else ""


def warm(folder: Path) -> None:
    """Start the process that children are forked from: it stays for the next one."""
    assert Child("--version", folder=folder).end() == 0
