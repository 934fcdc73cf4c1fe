"""Gangs of processes for tests: forked from a server that has torch already, or started by mpirun."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch

from manyhands.core.rank_info import RankInfo, RankStatus
from manyhands.transports.base import Transport
from manyhands.transports.connect import connect

DIED = "died"  # the result of a rank that ended without one
PATIENCE = 60.0
TESTS = Path(__file__).parents[1]
Make = Callable[[RankInfo], Transport]
Rank = Callable[[Transport], Any]

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "manyhands.testing.transports",
        "manyhands.transports.shm.transport",
        "manyhands.transports.torch_",
        "manyhands.cli",  # with the next two: what tests/children.py forks trains at once
        "manyhands.runs.train",
        "torch._dynamo",
        "sklearn.datasets",
        __name__,
    ]
)


class PipeLine:
    """A worker's end of the line: exchanges go through the test's process."""

    stop: int | None = None

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def exchange(self, value: Any) -> list[Any]:
        say(self._pipe, ("exchange", value))
        values: list[Any] = hear(self._pipe)
        return values

    def tell(self, message: Any) -> None: ...

    def watch(self, status: Callable[[], RankStatus]) -> None: ...

    def post(self, name: str, value: Any) -> None: ...


def say(pipe: Connection, message: Any) -> None:
    pipe.send_bytes(pickle.dumps(message))  # not `send`: torch would pass tensors on as open files


def hear(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())  # noqa: S301 from our own children


def serve(pipe: Connection, make: Make, rank: int, hosts: tuple[str, ...], function: Rank) -> None:
    """Be one rank: build the transport, call the function, answer."""
    torch.set_num_threads(1)
    transport = None
    try:
        transport = make(RankInfo(rank, hosts, PipeLine(pipe)))
        answer = ("result", function(transport))
    except Exception:  # noqa: BLE001 told to the test
        answer = ("failure", traceback.format_exc())
    if transport is not None:
        transport.close()
    say(pipe, answer)


def processes(make: Make, hosts: Sequence[str], function: Rank) -> list[Any]:
    """Run the function at each rank in a process of its own; the first failure by rank is raised."""
    return begun(serve, [(make, rank, tuple(hosts), function) for rank in range(len(hosts))])


def begun(target: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Run the target once for each of these, in a process with a pipe to here; what all of them said."""
    pipes, workers = [], []
    for each in arguments:
        ours, theirs = context.Pipe()
        worker = context.Process(target=target, args=(theirs, *each))
        worker.start()
        theirs.close()
        pipes.append(ours)
        workers.append(worker)
    try:
        return attend(pipes)
    finally:
        for worker in workers:
            worker.join(5)
            if worker.is_alive():
                worker.kill()
                worker.join()
        for pipe in pipes:
            pipe.close()


def attend(pipes: Sequence[Connection]) -> list[Any]:
    """Answer exchanges until every rank has a result."""
    results: dict[int, tuple[str, Any]] = {}
    values: dict[int, Any] = {}
    while len(results) < len(pipes):
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in results], PATIENCE)
        assert ready, f"nothing came for {PATIENCE:.0f} s; there are results of ranks {sorted(results)}"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                kind, value = hear(pipe)
            except (EOFError, ConnectionResetError):
                kind, value = "result", DIED
            if kind == "exchange":
                values[rank] = value
            else:
                results[rank] = kind, value
        if len(values) == len(pipes):
            for pipe in pipes:
                say(pipe, [values[rank] for rank in range(len(pipes))])
            values.clear()
    for rank in range(len(pipes)):
        kind, value = results[rank]
        assert kind == "result", f"rank {rank} failed:\n{value}"
    return [results[rank][1] for rank in range(len(pipes))]


def between_hosts(info: RankInfo, name: str, timeout: float = 30.0) -> Transport:
    """As engine/session.py does it; the host names of a test are not known to any resolver."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    return connect(name, info, timeout=timeout)


class MpiGang:
    """Processes that mpirun started once and that work for many tests."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        address = f"{self._folder.name}/door"
        with Listener(address, "AF_UNIX", backlog=size) as door:
            self.mpirun = mpirun(
                size, "from transports.gangs import mpi_rank; mpi_rank()", address, self._folder.name
            )
            pipes = {}
            for _ in range(size):
                pipe = door.accept()
                pipes[hear(pipe)] = pipe
        self.pipes = [pipes[rank] for rank in range(size)]

    def run(self, make: Make, hosts: Sequence[str], function: Rank) -> list[Any]:
        for pipe in self.pipes:
            say(pipe, (make, tuple(hosts), function))
        return attend(self.pipes)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        try:
            self.mpirun.wait(20)
        finally:
            self.mpirun.kill()
            self.mpirun.wait()
            self._folder.cleanup()


def mpirun(size: int, code: str, argument: str, folder: str) -> subprocess.Popen[str]:
    """Start Python processes under mpirun; whatever they leave behind is left in the folder."""
    path = str(Path(sys.executable).parent)
    return subprocess.Popen(
        [
            f"{path}/mpirun",
            "-n",
            str(size),
            "--map-by",
            ":OVERSUBSCRIBE",
            sys.executable,
            "-c",
            code,
            argument,
        ],
        env={
            **os.environ,
            "PATH": f"{path}:{os.environ['PATH']}",
            "PYTHONPATH": str(TESTS),
            "TMPDIR": folder,
            "OMPI_MCA_btl_sm_backing_directory": folder,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def mpi_rank() -> None:
    """Be one rank of an MpiGang until it closes."""
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    pipe = Client(sys.argv[1], "AF_UNIX")
    say(pipe, rank)
    while True:
        try:
            make, hosts, function = hear(pipe)
        except EOFError:
            return
        serve(pipe, make, rank, hosts, function)


def dies_in_mpi() -> None:
    """Rank 1 ends while rank 0 waits for it."""
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    transport = connect("mpi", RankInfo(rank, ("here", "here")))
    transport.barrier()
    if rank == 1:
        os._exit(3)
    transport.barrier()
