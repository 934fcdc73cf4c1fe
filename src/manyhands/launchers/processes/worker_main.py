"""What a worker process runs: connect to the control server, run its calls one after the other, and leave.

python -m manyhands.launchers.processes.worker_main       under mpirun; the server is in the environment
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from manyhands.core.errors import ManyhandsError
from manyhands.core.rank_info import RankInfo
from manyhands.launchers.control.client import Call, ControlClient
from manyhands.launchers.control.handshake import connect_with_retries
from manyhands.launchers.control.remote_calls import CallResult, perform
from manyhands.launchers.worker_logs import log_of, redirect_output

# The server's address and key, and all else that a rank of mpirun must know: never on a command line.
VARIABLE = "MANYHANDS_HUB"
CONNECT = 60.0  # seconds to reach the server


def serve(client: ControlClient, rank: int) -> None:
    """Run calls until there are no more."""
    while isinstance(call := client.next_call(), Call):
        client.answer(run_call(call, client, rank))
    client.close()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def run_call(call: Call, client: ControlClient, rank: int) -> CallResult:
    """Run one call: as a rank of a worker group, or for an executor."""
    info = None
    if call.hosts is not None:
        info = RankInfo(rank, call.hosts, client, call.joining)
        os.environ.update(rank_environment(info))
    result = perform(call.payload, info)
    if result.failure is not None and call.hosts is not None:
        print(result.failure.trace, file=sys.stderr, end="", flush=True)
    return result


def rank_environment(info: RankInfo) -> dict[str, str]:
    """The variables that user code looks for, with the names that torchrun uses."""
    return {
        "RANK": str(info.rank),
        "WORLD_SIZE": str(info.size),
        "LOCAL_RANK": str(info.local_rank),
        "LOCAL_WORLD_SIZE": str(len(info.peers_on_host)),
    }


def _main(environ: Mapping[str, str]) -> None:
    """Be a rank of mpirun; it leaves in the ordinary way, because mpi4py finalizes MPI at exit."""
    settings = json.loads(environ[VARIABLE])
    del os.environ[VARIABLE]
    if settings["pythonpath"] is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = settings["pythonpath"]
    sys.argv[:] = settings["argv"]
    rank = settings["first"] + int(environ["OMPI_COMM_WORLD_RANK"])
    try:
        connection = connect_with_retries(settings["address"], bytes.fromhex(settings["key"]), CONNECT)
    except ManyhandsError as error:
        sys.exit(f"error: worker {rank}: {error}")
    client = ControlClient(connection, rank, socket.gethostname())
    logs = Path(settings["logs"]) if settings["logs"] else None
    redirect_output(log_of(logs, rank), f"worker {rank} {settings['title']}")
    serve(client, rank)


if __name__ == "__main__":
    _main(dict(os.environ))
