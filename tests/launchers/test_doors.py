"""On one host nothing of ours can be reached from another: where processes listen while they work."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launchers.doors import listening, open_to_others
from launchers.test_env import free_port
from launchers.workers import look_for_doors
from manyhands.core.errors import UsageError
from manyhands.launchers import mpi
from manyhands.launchers.local import LocalLauncher
from manyhands.launchers.mpi import MpiLauncher

TESTS = Path(__file__).parents[1]
UNDER_TORCHRUN = """
import json, os
from launchers.workers import look_for_doors
from manyhands.launchers.env.launcher import EnvLauncher
print(json.dumps(EnvLauncher(gather=60).launch(look_for_doors, 2, os.getpid())))
"""


def judge(seen: list[list[str]]) -> None:
    """The store and gloo must be somewhere, or nobody has looked."""
    found = {door for each in seen for door in each}
    assert found
    assert open_to_others(found) == set()


def test_the_look_itself_finds_what_is_open() -> None:
    before = listening()
    for host, is_open in (("127.0.0.1", False), ("0.0.0.0", True), ("::1", False), ("::", True)):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as server:
            found = listening() - before
            assert found == {f"{host}:{server.getsockname()[1]}"}
            assert open_to_others(found) == (found if is_open else set())


def test_local() -> None:
    """D5: the torch transport's store was open to all, without a password."""
    judge(LocalLauncher().launch(look_for_doors, 2, os.getpid()))


def test_mpi() -> None:
    """Open MPI's own sockets in our workers, too; mpirun's are its own."""
    judge(MpiLauncher().launch(look_for_doors, 2, os.getpid(), "mpi"))


def test_torchrun() -> None:
    """By hand: test_torchrun.py looks at a real one."""
    # c10d's rendezvous names the host, and not its loopback
    environ = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": socket.gethostname()}
    environ |= {"MASTER_PORT": str(free_port()), "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", UNDER_TORCHRUN],
            env={**os.environ, **environ, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    for answer in [process.communicate(timeout=120)[0] for process in processes]:
        judge(json.loads(answer))


def test_launcher_mpi_opens_one_address_for_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first version listened on every interface as soon as hosts were named."""
    ways = {"near": "10.0.0.7", "10.9.9.9": "10.0.0.8"}

    def source(address: str) -> str:
        if address not in ways:
            raise OSError(f"no way to {address}")
        return ways[address]

    monkeypatch.setattr(mpi, "source", source)
    here = socket.gethostname()
    assert mpi.door("") is None
    assert mpi.door(f"localhost:2,127.0.0.1,{here}:4") is None  # all of them are this host
    assert mpi.door(f"{here}:2,near:2") == "10.0.0.7:0"
    assert mpi.door("far:2,10.9.9.9:2") == "10.0.0.8:0"
    with pytest.raises(
        UsageError, match=r"^MANYHANDS_HOSTS=far:2: no way leads from this host to far; write"
    ):
        mpi.door("far:2")
