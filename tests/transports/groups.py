"""Groups of processes for tests: forked from a server that has imported torch, or started by mpirun."""

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
TIMEOUT = 60.0
TESTS = Path(__file__).parents[1]
Make = Callable[[RankInfo], Transport]
Rank = Callable[[Transport], Any]

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "manyhands.testing.transports",
        "manyhands.transports.shm.transport",
        "manyhands.transports.torch_",
        "manyhands.cli",  # this and the next two: for the children that tests/children.py forks
        "manyhands.runs.train",
        "torch._dynamo",
        "sklearn.datasets",
        __name__,
    ]
)


class PipeChannel:
    """A control channel whose exchanges go through the process of the test."""

    stop: int | None = None

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def exchange(self, value: Any) -> list[Any]:
        send(self._pipe, ("exchange", value))
        values: list[Any] = receive(self._pipe)
        return values

    def tell(self, message: Any) -> None: ...

    def watch(self, status: Callable[[], RankStatus]) -> None: ...

    def post(self, name: str, value: Any) -> None: ...


def send(pipe: Connection, message: Any) -> None:
    pipe.send_bytes(pickle.dumps(message))  # not `send`: torch would pass tensors on as open files


def receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())  # noqa: S301 from our own children


def run_rank(pipe: Connection, make: Make, rank: int, hosts: tuple[str, ...], function: Rank) -> None:
    """Run one rank: build the transport, call the function, send the result."""
    torch.set_num_threads(1)
    transport = None
    try:
        transport = make(RankInfo(rank, hosts, PipeChannel(pipe)))
        result = ("result", function(transport))
    except Exception:  # noqa: BLE001 sent to the test
        result = ("failure", traceback.format_exc())
    if transport is not None:
        transport.close()
    send(pipe, result)


def processes(make: Make, hosts: Sequence[str], function: Rank) -> list[Any]:
    """Run the function at each rank in a process of its own, and raise the failure of the lowest rank."""
    return run_processes(run_rank, [(make, rank, tuple(hosts), function) for rank in range(len(hosts))])


def run_processes(target: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Run the target once for each of these arguments, in a process with a pipe, and return the results."""
    pipes, workers = [], []
    for each in arguments:
        ours, theirs = context.Pipe()
        worker = context.Process(target=target, args=(theirs, *each))
        worker.start()
        theirs.close()
        pipes.append(ours)
        workers.append(worker)
    try:
        return serve_exchanges(pipes)
    finally:
        for worker in workers:
            worker.join(5)
            if worker.is_alive():
                worker.kill()
                worker.join()
        for pipe in pipes:
            pipe.close()


def serve_exchanges(pipes: Sequence[Connection]) -> list[Any]:
    """Answer exchanges until every rank has a result."""
    results: dict[int, tuple[str, Any]] = {}
    values: dict[int, Any] = {}
    while len(results) < len(pipes):
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in results], TIMEOUT)
        assert ready, f"no message for {TIMEOUT:.0f} s; ranks {sorted(results)} have results"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                kind, value = receive(pipe)
            except (EOFError, ConnectionResetError):
                kind, value = "result", DIED
            if kind == "exchange":
                values[rank] = value
            else:
                results[rank] = kind, value
        if len(values) == len(pipes):
            for pipe in pipes:
                send(pipe, [values[rank] for rank in range(len(pipes))])
            values.clear()
    for rank in range(len(pipes)):
        kind, value = results[rank]
        assert kind == "result", f"rank {rank} failed:\n{value}"
    return [results[rank][1] for rank in range(len(pipes))]


def between_hosts(info: RankInfo, name: str, timeout: float = 30.0) -> Transport:
    """Connect as engine/session.py does, although the host names of a test do not resolve."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    return connect(name, info, timeout=timeout)


class MpiGroup:
    """Processes that mpirun started once and that many tests use."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        address = f"{self._folder.name}/socket"
        with Listener(address, "AF_UNIX", backlog=size) as listener:
            self.mpirun = mpirun(
                size, "from transports.groups import mpi_rank; mpi_rank()", address, self._folder.name
            )
            pipes = {}
            for _ in range(size):
                pipe = listener.accept()
                pipes[receive(pipe)] = pipe
        self.pipes = [pipes[rank] for rank in range(size)]

    def run(self, make: Make, hosts: Sequence[str], function: Rank) -> list[Any]:
        for pipe in self.pipes:
            send(pipe, (make, tuple(hosts), function))
        return serve_exchanges(self.pipes)

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
    """Start Python processes under mpirun, with all their temporary files in the folder."""
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
    """Run one rank of an MpiGroup until the group is closed."""
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    pipe = Client(sys.argv[1], "AF_UNIX")
    send(pipe, rank)
    while True:
        try:
            make, hosts, function = receive(pipe)
        except EOFError:
            return
        run_rank(pipe, make, rank, hosts, function)


def dies_in_mpi() -> None:
    """Rank 1 dies while rank 0 waits for it."""
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    transport = connect("mpi", RankInfo(rank, ("here", "here")))
    transport.barrier()
    if rank == 1:
        os._exit(3)
    transport.barrier()
