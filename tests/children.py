"""A command or a script in a process of its own, which can be killed: forked from one that has torch."""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transports.groups import context

TIMEOUT = 60.0  # seconds


def run(words: list[str], folder: Path, environment: dict[str, str], output: Path) -> None:
    """Be the command line, as its entry point is, or a script with its arguments."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    is_script = words[0].endswith(".py")
    if is_script or {"--workers", "--launcher", "study"} & set(words):
        spare()
    if is_script:
        sys.path.insert(0, str(Path(words[0]).parent))
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")
        return
    from manyhands import cli

    sys.exit(cli.answer(words))


def spare() -> None:
    """Let the launcher's fork server be a fork of this process, which has torch, not a new interpreter.

    It is forked now, while there is one thread, and waits; it ends with this process.
    """
    from manyhands.launchers.processes import fork_server, local_processes

    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        request, descriptors, _, _ = socket.recv_fds(theirs, 2**16, 1)
        if request:
            theirs.close()
            os.setsid()
            nothing = os.open(os.devnull, os.O_RDWR)
            for standard in range(3):
                os.dup2(nothing, standard)
            parent, *modules = json.loads(request)
            fork_server.main(descriptors[0], int(parent), modules)
        os._exit(0)
    theirs.close()
    free = [pid]

    def started(command: Sequence[str], **settings: Any) -> Any:
        """What `subprocess.Popen` does: the first time with the spare process."""
        if not free:
            return subprocess.Popen(command, **settings)
        (control,) = settings["pass_fds"]
        arguments = command[command.index(str(control)) + 1 :]
        socket.send_fds(ours, [json.dumps(arguments).encode()], [control])
        return Forked(free.pop())

    # Of this process alone, and it runs one command.
    local_processes.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": started})  # type: ignore[assignment]


class Forked:
    """A forked child with as much of `subprocess.Popen` as the launcher uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float = TIMEOUT) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("the fork server", timeout)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


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
