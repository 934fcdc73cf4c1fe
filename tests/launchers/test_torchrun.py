"""A real torchrun on one host: who gets in while it starts, where it listens, what stays when it is killed.

One run serves all three questions: it takes seconds to start.
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

from launchers.doors import listening, open_to_others
from launchers.test_attacks import Evil, guessable
from manyhands.launchers.control.connection import HandshakeError, connect

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
SOON = 15.0  # seconds, on a machine that is busy: without a watch the workers would stay for good


class Seen(NamedTuple):
    """What was observed of one run."""

    evil: bool  # whether the stranger's code ran
    tries: bytes  # of the stranger: `.` for each, `!` for a handshake that it passed, `?` if it broke down
    doors: set[str]  # where the workers listen
    left: list[int]  # of the workers, when torchrun had been gone for long
    said: str


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """torchrun with a fixed port while a stranger knocks; killed once its workers train."""
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
    stranger, tries = knock(port + 1, folder / "evil")
    with (folder / "said").open("w") as said:
        torchrun = subprocess.Popen(
            [*command, *TRAIN], cwd=folder, stdout=said, stderr=said, env={**environ, "TMPDIR": str(folder)}
        )
    workers: list[int] = []
    heard = bytearray()
    try:
        hold_the_second(torchrun.pid, folder, heard, tries)
        assert await_it(lambda: steps(folder / "run") or torchrun.poll() is not None, 90)
        workers = children(torchrun.pid)
        assert len(workers) == 2, (folder / "said").read_text()
        doors = set().union(*(listening(worker) for worker in workers))
        torchrun.kill()
        torchrun.wait()
        await_it(lambda: not any(map(alive, workers)), SOON)
        left = [worker for worker in workers if alive(worker)]
        heard += os.read(tries, 2**20)
        said_all = (folder / "said").read_text()
        yield Seen((folder / "evil").exists(), bytes(heard), doors, left, said_all)
    finally:
        workers = workers or children(torchrun.pid)
        torchrun.kill()
        torchrun.wait()
        for pid in [worker for worker in workers if alive(worker)] + [stranger]:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(stranger, 0)
        os.close(tries)


def test_a_stranger_who_guesses_the_key_runs_nothing(seen: Seen) -> None:
    """D1: as another user, if the test may be one; all that the key was made of is known to everybody."""
    assert seen.tries.count(b".") > 20
    assert b"?" not in seen.tries
    assert b"!" not in seen.tries
    assert not seen.evil, "a stranger's code ran in worker 0"


def test_its_workers_listen_on_the_loopback_only(seen: Seen) -> None:
    """D5: with the torch transport, whose store and gloo's sockets must be somewhere."""
    assert seen.doors
    assert open_to_others(seen.doors) == set()


def test_workers_end_when_torchrun_is_killed(seen: Seen) -> None:
    """D10: one of them says why, and nobody is called lost."""
    assert seen.left == []
    errors = [line for line in seen.said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, seen.said
    assert "which started this worker, is gone (killed or crashed): the workers end, too" in errors[0]


def hold_the_second(torchrun: int, folder: Path, heard: bytearray, tries: int) -> None:
    """Let worker 0 wait for worker 1 for a moment, as it does where one of them is slow: then it is open."""

    def waits() -> bool:
        heard.extend(os.read(tries, 2**16))
        return b"!" in heard or bool(list(folder.glob("manyhands-*/*.json")))

    assert await_it(lambda: 1 in (ranks := by_rank(torchrun)) and 0 in ranks, 60)
    second = by_rank(torchrun)[1]
    os.kill(second, signal.SIGSTOP)
    try:
        assert await_it(waits, 20), (folder / "said").read_text()
        time.sleep(0.5)
    finally:
        os.kill(second, signal.SIGCONT)


def by_rank(torchrun: int) -> dict[int, int]:
    """Its workers, as soon as they have been told who they are."""
    found = {}
    for pid in children(torchrun):
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found.update({int(word[5:]): pid for word in words if word.startswith(b"RANK=")})
    return found


def knock(port: int, evil: Path) -> tuple[int, int]:
    """Another user, as a process, who tries the key of the first version; and where its tries are told."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    key = guessable(f"none:0:127.0.0.1:{port}")
    pid = os.fork()
    if pid == 0:
        try:
            try_it(f"127.0.0.1:{port}", key, evil, writing)  # imports what another user might not be able to
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
        wire = connect(address, key, 1.0)
    except (OSError, HandshakeError):
        return
    os.write(tries, b"!")
    wire.send("hello", 7, "h", Evil(evil))
    wire.flush_for(1.0)
    time.sleep(1.0)


def free_pair() -> int:
    """A port whose next one is free, too."""
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
    """How much of its journal is there."""
    file = run / "steps.jsonl"
    return file.stat().st_size if file.exists() else 0


def children(pid: int) -> list[int]:
    file = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in file.read_text().split()] if file.exists() else []


def alive(pid: int) -> bool:
    """Whether it runs; what nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
