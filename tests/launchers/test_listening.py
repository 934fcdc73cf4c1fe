"""On one host no process of ours can be reached from another: where processes listen during a run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launchers.functions import listening_addresses
from launchers.listening import listening, open_to_others
from launchers.test_env import free_port
from manyhands.core.errors import UsageError
from manyhands.launchers import mpi
from manyhands.launchers.local import LocalLauncher
from manyhands.launchers.mpi import MpiLauncher

TESTS = Path(__file__).parents[1]
UNDER_TORCHRUN = """
import json, os
from launchers.functions import listening_addresses
from manyhands.launchers.env.launcher import EnvLauncher
print(json.dumps(EnvLauncher(timeout=60).launch(listening_addresses, 2, os.getpid())))
"""


def check(addresses: list[list[str]]) -> None:
    """The store and gloo listen somewhere: if nothing is found, the test itself is wrong."""
    found = {address for each in addresses for address in each}
    assert found
    assert open_to_others(found) == set()


def test_listening_finds_open_addresses() -> None:
    before = listening()
    for host, is_open in (("127.0.0.1", False), ("0.0.0.0", True), ("::1", False), ("::", True)):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as server:
            found = listening() - before
            assert found == {f"{host}:{server.getsockname()[1]}"}
            assert open_to_others(found) == (found if is_open else set())


def test_local() -> None:
    """D5: the torch transport's store could be reached by all, without a password."""
    check(LocalLauncher().launch(listening_addresses, 2, os.getpid()))


def test_mpi() -> None:
    """Also Open MPI's sockets in our workers; those of mpirun itself are not ours."""
    check(MpiLauncher().launch(listening_addresses, 2, os.getpid(), "mpi"))


def test_torchrun() -> None:
    """By hand: test_torchrun.py has a real one."""
    # torchrun's c10d rendezvous gives the name of the host, not its loopback
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
        check(json.loads(answer))


def test_launcher_mpi_listens_at_one_address_for_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first version listened on every interface as soon as hosts were named."""
    routes = {"near": "10.0.0.7", "10.9.9.9": "10.0.0.8"}

    def source(address: str) -> str:
        if address not in routes:
            raise OSError(f"no route to {address}")
        return routes[address]

    monkeypatch.setattr(mpi, "source", source)
    here = socket.gethostname()
    assert mpi.listen_address("") is None
    assert mpi.listen_address(f"localhost:2,127.0.0.1,{here}:4") is None  # all of them are this host
    assert mpi.listen_address(f"{here}:2,near:2") == "10.0.0.7:0"
    assert mpi.listen_address("far:2,10.9.9.9:2") == "10.0.0.8:0"
    with pytest.raises(UsageError, match=r"^MANYHANDS_HOSTS=far:2: this host has no route to far; use"):
        mpi.listen_address("far:2")
