"""A real torchrun on one host: attacks while it starts, where it listens, what is left when it is killed.

One run serves all three tests, because it takes seconds to start.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from launchers.listening import listening, open_to_others
from launchers.test_attacks import Evil, guessable
from manyhands.launchers.control.handshake import HandshakeError, connect

BIN = Path(sys.executable).parent
NOBODY = 65534
TRAIN = [
    "-m",
    "manyhands",
    "train",
    "quadratic",
    "--epochs",
    "1000000",
    "--transport",
    "torch",
    "--out",
    "run",
]
SOON = 15.0  # seconds, on a machine that is busy: otherwise the workers would stay forever


class Observed(NamedTuple):
    """What was observed of one run."""

    evil: bool  # whether the attacker's code ran
    tries: bytes  # of the attacker: `.` for each, `!` for a handshake that it passed, `?` if it failed itself
    listening: set[str]  # addresses of the workers
    left: list[int]  # workers that are alive long after torchrun was killed
    output: str


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """torchrun with a fixed port while an attacker tries to connect; killed once its workers train."""
    folder = tmp_path_factory.mktemp("torchrun")
    port = free_pair()
    command = [
        BIN / "torchrun",
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        f"{port}",
    ]
    environ = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    attacker, tries = start_attacker(port + 1, folder / "evil")
    with (folder / "output").open("w") as output:
        torchrun = subprocess.Popen(
            [*command, *TRAIN],
            cwd=folder,
            stdout=output,
            stderr=output,
            env={**environ, "TMPDIR": str(folder)},
        )
    workers: list[int] = []
    results = bytearray()
    try:
        delay_worker_1(torchrun.pid, folder, results, tries)
        assert await_it(lambda: steps(folder / "run") or torchrun.poll() is not None, 90)
        workers = children(torchrun.pid)
        assert len(workers) == 2, (folder / "output").read_text()
        addresses = set().union(*(listening(worker) for worker in workers))
        torchrun.kill()
        torchrun.wait()
        await_it(lambda: not any(map(alive, workers)), SOON)
        left = [worker for worker in workers if alive(worker)]
        results += os.read(tries, 2**20)
        printed = (folder / "output").read_text()
        yield Observed((folder / "evil").exists(), bytes(results), addresses, left, printed)
    finally:
        workers = workers or children(torchrun.pid)
        torchrun.kill()
        torchrun.wait()
        for pid in [worker for worker in workers if alive(worker)] + [attacker]:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(attacker, 0)
        os.close(tries)


def test_an_attacker_who_guesses_the_key_runs_nothing(observed: Observed) -> None:
    """D1: as another user, if the test runs as root; every user knew what the key was made of."""
    assert observed.tries.count(b".") > 20
    assert b"?" not in observed.tries
    assert b"!" not in observed.tries
    assert not observed.evil, "an attacker's code ran in worker 0"


def test_its_workers_listen_on_the_loopback_only(observed: Observed) -> None:
    """D5: with the torch transport, whose store and gloo's sockets listen somewhere."""
    assert observed.listening
    assert open_to_others(observed.listening) == set()


def test_workers_end_when_torchrun_is_killed(observed: Observed) -> None:
    """D10: one of them says why, and no worker is called lost."""
    assert observed.left == []
    errors = [line for line in observed.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, observed.output
    assert "which started this worker, was killed or crashed; its workers end, too" in errors[0]


def delay_worker_1(torchrun: int, folder: Path, results: bytearray, tries: int) -> None:
    """Let worker 0 wait for worker 1 for a moment, as for a slow one: it listens during that time."""

    def waits() -> bool:
        results.extend(os.read(tries, 2**16))
        return b"!" in results or bool(list(folder.glob("manyhands-*/*.json")))

    assert await_it(lambda: 1 in (ranks := by_rank(torchrun)) and 0 in ranks, 60)
    second = by_rank(torchrun)[1]
    os.kill(second, signal.SIGSTOP)
    try:
        assert await_it(waits, 20), (folder / "output").read_text()
        time.sleep(0.5)
    finally:
        os.kill(second, signal.SIGCONT)


def by_rank(torchrun: int) -> dict[int, int]:
    """The pids of its workers by rank, once their environment is set."""
    found = {}
    for pid in children(torchrun):
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found.update({int(word[5:]): pid for word in words if word.startswith(b"RANK=")})
    return found


def start_attacker(port: int, evil: Path) -> tuple[int, int]:
    """A process of another user that tries the key of the first version: its pid, and a pipe of its tries."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    key = guessable(f"none:0:127.0.0.1:{port}")
    pid = os.fork()
    if pid == 0:
        try:
            try_it(
                f"127.0.0.1:{port}", key, evil, writing
            )  # imports first what another user may not be able to read
            if os.getuid() == 0:
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            while True:
                os.write(writing, b".")
                try_it(f"127.0.0.1:{port}", key, evil, writing)
                time.sleep(0.01)
        finally:
            os.write(writing, b"?")
            os._exit(0)
    os.close(writing)
    return pid, reading


def try_it(address: str, key: bytes, evil: Path, tries: int) -> None:
    try:
        connection = connect(address, key, 1.0)
    except (OSError, HandshakeError):
        return
    os.write(tries, b"!")
    connection.send("hello", 7, "h", Evil(evil))
    connection.flush_for(1.0)
    time.sleep(1.0)


def free_pair() -> int:
    """A free port that is followed by another free port."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port = int(one.getsockname()[1])
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
        return port


def await_it(done: Callable[[], object], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not done():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def steps(run: Path) -> int:
    """The size of its journal so far."""
    file = run / "steps.jsonl"
    return file.stat().st_size if file.exists() else 0


def children(pid: int) -> list[int]:
    file = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in file.read_text().split()] if file.exists() else []


def alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
