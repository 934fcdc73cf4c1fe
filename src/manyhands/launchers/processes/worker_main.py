"""What a started process runs: link up with the hub, carry out its calls one after the other, and leave.

python -m manyhands.launchers.processes.worker_main       under mpirun; where the hub is, the environment says
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from manyhands.core.errors import ManyhandsError
from manyhands.core.rank_info import RankInfo
from manyhands.launchers.control.client import Call, ControlClient
from manyhands.launchers.control.connection import Connection, HandshakeError, connect
from manyhands.launchers.control.remote_calls import CallResult, perform

VARIABLE = (
    "MANYHANDS_HUB"  # where the hub is, its key and what else a rank must know: never on a command line
)
RETRY = 0.1


def serve(link: ControlClient, rank: int) -> None:
    """Carry out calls until there are no more."""
    while isinstance(call := link.next_call(), Call):
        link.answer(carry_out(call, link, rank))
    link.close()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def carry_out(call: Call, link: ControlClient, rank: int) -> CallResult:
    """One call: at its place in a gang, or alone."""
    info = None
    if call.hosts is not None:
        info = RankInfo(rank, call.hosts, link, call.joining)
        os.environ.update(ranks_environment(info))
    answer = perform(call.payload, info)
    if answer.failure is not None and call.hosts is not None:
        print(answer.failure.trace, file=sys.stderr, end="", flush=True)
    return answer


def ranks_environment(info: RankInfo) -> dict[str, str]:
    """What user code looks for: the names that torchrun uses."""
    return {
        "RANK": str(info.rank),
        "WORLD_SIZE": str(info.size),
        "LOCAL_RANK": str(info.local_rank),
        "LOCAL_WORLD_SIZE": str(len(info.peers_on_host)),
    }


def log_of(folder: Path | None, rank: int) -> Path | None:
    """The file that a rank's own output goes to."""
    return None if folder is None else folder / f"rank-{rank}.log"


def has_words(log: Path | None) -> bool:
    """Whether the last process that wrote there has written anything but its heading."""
    if log is None:
        return False
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 2**16))
            return file.read().rpartition(b"\n--- ")[2].count(b"\n") > 1
    except OSError:
        return False


def redirect(log: Path | None, title: str) -> None:
    """Let all that this process writes, Python or not, go to its log, and a crash leave a traceback there."""
    target = os.open(os.devnull, os.O_WRONLY)
    if log is not None:
        with contextlib.suppress(OSError):  # a host without that folder: its words are lost, the run is not
            log.parent.mkdir(parents=True, exist_ok=True)
            target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(target, number)
    os.close(target)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    print(f"--- {now} {title}, pid {os.getpid()}", flush=True)
    faulthandler.enable(sys.stderr)


def link_up(address: str, key: bytes, rank: int, host: str, within: float = 60.0) -> ControlClient:
    """Connect to the hub, which may not be there yet."""
    return ControlClient(reach(address, key, within), rank, host)


def reach(address: str, key: bytes, within: float) -> Connection:
    """A wire to whoever listens there and knows the key; ManyhandsError when nobody does for so long."""
    return reach_by(lambda: (address, key), within, f"no leader answered at {address.removeprefix('@')}")


def reach_by(note: Callable[[], tuple[str, bytes] | None], within: float, complaint: str) -> Connection:
    """The same, by a note that is looked at again each time: that of a run that was killed leads nowhere."""
    until = time.monotonic() + within
    while True:
        reason = ""
        try:
            if (told := note()) is not None:
                return connect(*told)
        except (OSError, HandshakeError) as error:
            reason = f": {error}"
        if time.monotonic() > until:
            raise ManyhandsError(f"{complaint} within {within:g} s{reason}")
        time.sleep(RETRY)


def _main(environ: Mapping[str, str]) -> None:
    """A rank of mpirun; it leaves in the ordinary way, because that is where mpi4py says goodbye."""
    told = json.loads(environ[VARIABLE])
    del os.environ[VARIABLE]
    if told["pythonpath"] is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = told["pythonpath"]
    sys.argv[:] = told["argv"]
    rank = told["first"] + int(environ["OMPI_COMM_WORLD_RANK"])
    try:
        link = link_up(told["address"], bytes.fromhex(told["key"]), rank, socket.gethostname())
    except ManyhandsError as error:
        sys.exit(f"error: worker {rank}: {error}")
    logs = Path(told["logs"]) if told["logs"] else None
    redirect(log_of(logs, rank), f"worker {rank} {told['title']}")
    serve(link, rank)


if __name__ == "__main__":
    _main(dict(os.environ))
