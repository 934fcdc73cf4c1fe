"""Under which starter this process runs, as which rank, and where the ranks of its job meet.

`detect` reads environment variables and nothing else. How the meeting place is found:

    torchrun          MASTER_ADDR, and MASTER_PORT + 1 (torchrun's own agent listens at MASTER_PORT)
    any, one host     a file in the temporary folder, named after the job, readable by its user only
    mpirun, hosts     broadcast by mpi4py
    Slurm, hosts      the first host of the step, and a port made from the job's number
    MANYHANDS_PORT    replaces the port

The key is random where the meeting place can carry a secret: file and broadcast. Elsewhere it is made of what
all ranks know (address, job, user): it keeps jobs apart and accidents away, but it is no secret from others
in that network, who could then run code as this user. There, set MANYHANDS_KEY to one secret everywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from manyhands.errors import ManyhandsError, UsageError, shown

PORT, KEY = "MANYHANDS_PORT", "MANYHANDS_KEY"
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Starter = Literal["torchrun", "mpirun", "slurm"]


class Found(NamedTuple):
    """One rank of a job that somebody else has started."""

    starter: Starter
    rank: int
    size: int
    local_rank: int
    local_size: int  # 0: not told
    job: str  # tells this job from others of the same user
    address: str = ""  # `host:port` where the starter fixes it; empty: by file or broadcast

    @property
    def one_host(self) -> bool:
        """Whether all ranks are known to be on this host."""
        return self.local_size == self.size


def detect(environ: Mapping[str, str]) -> Found | None:
    """The job this process is a rank of, or None when it is a process of its own."""
    return _torchrun(environ) or _open_mpi(environ) or _slurm(environ) or _pmi(environ)


def _torchrun(environ: Mapping[str, str]) -> Found | None:
    if not {"RANK", "WORLD_SIZE"} <= environ.keys():
        return None
    if PORT not in environ and not {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        return None
    host = environ.get("MASTER_ADDR", "127.0.0.1")
    port = _number(environ, PORT) if PORT in environ else _number(environ, "MASTER_PORT") + 1
    job = ":".join(environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"))
    return Found(
        "torchrun",
        _number(environ, "RANK"),
        _number(environ, "WORLD_SIZE"),
        _number(environ, "LOCAL_RANK", 0),
        _number(environ, "LOCAL_WORLD_SIZE", 0),
        f"{job}:{host}:{port}",
        f"{host}:{port}",
    )


def _open_mpi(environ: Mapping[str, str]) -> Found | None:
    if not {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"} <= environ.keys():
        return None
    return Found(
        "mpirun",
        _number(environ, "OMPI_COMM_WORLD_RANK"),
        _number(environ, "OMPI_COMM_WORLD_SIZE"),
        _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
        _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", 0),
        environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or "",
    )


def _pmi(environ: Mapping[str, str]) -> Found | None:
    """MPICH, Intel MPI and others that start ranks by way of Hydra."""
    if not {"PMI_RANK", "PMI_SIZE"} <= environ.keys():
        return None
    return Found(
        "mpirun",
        _number(environ, "PMI_RANK"),
        _number(environ, "PMI_SIZE"),
        _number(environ, "MPI_LOCALRANKID", 0),
        _number(environ, "MPI_LOCALNRANKS", 0),
        environ.get("PMI_JOBID") or environ.get("PMI_ID_JOB") or "",
    )


def _slurm(environ: Mapping[str, str]) -> Found | None:
    """A step of srun; the shell that sbatch gives is not one, whatever the size of its allocation."""
    size = _number(environ, "SLURM_STEP_NUM_TASKS", 1)
    if size < 2 or "SLURM_PROCID" not in environ:
        return None
    hosts = nodes(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
    job = f"{environ.get('SLURM_JOB_ID', '0')}.{environ.get('SLURM_STEP_ID', '0')}"
    by_job = 20_000 + int(hashlib.sha256(job.encode()).hexdigest(), 16) % 10_000
    port = _number(environ, PORT, by_job)
    return Found(
        "slurm",
        _number(environ, "SLURM_PROCID"),
        size,
        _number(environ, "SLURM_LOCALID", 0),
        size if len(hosts) < 2 else 0,
        f"slurm-{job}",
        "" if len(hosts) < 2 else f"{hosts[0]}:{port}",
    )


def nodes(text: str) -> list[str]:
    """Slurm's way to write host names: `node[01-03,07],x1` is node01, node02, node03, node07 and x1."""
    return [host for part in _split(text) for host in _expand(part)]


def _split(text: str) -> list[str]:
    """At the commas outside brackets."""
    return [part for part in re.split(r",(?![^\[]*\])", text) if part]


def _expand(pattern: str) -> Iterator[str]:
    pieces = re.split(r"\[([^\]]*)\]", pattern)  # text, ranges, text, ranges, ..., text
    choices = [[piece] if number % 2 == 0 else list(_ranges(piece)) for number, piece in enumerate(pieces)]
    return ("".join(parts) for parts in itertools.product(*choices))


def _ranges(text: str) -> Iterator[str]:
    for part in text.split(","):
        low, dash, high = part.partition("-")
        if not dash:
            yield low
        else:
            yield from (str(number).zfill(len(low)) for number in range(int(low), int(high) + 1))


def key_of(found: Found, environ: Mapping[str, str]) -> bytes:
    """The key of a job whose meeting place is fixed: the user's secret, or else what all ranks know."""
    secret = environ.get(KEY) or f"{found.job}:{os.getuid()}"
    return hashlib.sha256(f"manyhands:{secret}".encode()).digest()


def meeting_file(found: Found) -> Path:
    """Where the leader of a job on one host leaves a note."""
    # A starter that names no job: its ranks on this host have one parent.
    name = re.sub(r"[^\w.-]", "_", found.job or f"parent-{os.getppid()}")
    return Path(tempfile.gettempdir()) / f"manyhands-{os.getuid()}-{name}.json"


def leave_note(path: Path, address: str, key: bytes) -> None:
    """For this user only, and whole or not at all."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # mode 600
    with os.fdopen(descriptor, "w") as file:
        json.dump({"address": address, "key": key.hex()}, file)
    Path(name).replace(path)


def read_note(path: Path) -> tuple[str, bytes] | None:
    """What the leader left, if it has; a note by another user is nobody's."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        with path.open() as file:
            about = os.fstat(file.fileno())
            if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
                return None
            note = json.load(file)
        return note["address"], bytes.fromhex(note["key"])
    return None


def await_note(path: Path, within: float) -> tuple[str, bytes]:
    """The same, when it comes."""
    until = time.monotonic() + within
    while (note := read_note(path)) is None:
        if time.monotonic() > until:
            raise ManyhandsError(f"worker 0 did not come to {path} within {within:g} s")
        time.sleep(0.05)
    return note


def broadcast(value: tuple[str, bytes] | None) -> tuple[str, bytes]:
    """By MPI itself, between hosts."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UsageError(
            f"workers on several hosts of mpirun meet by mpi4py, which cannot be imported ({error}): "
            "pip install 'manyhands[mpi]'"
        ) from None
    told: tuple[str, bytes] = MPI.COMM_WORLD.bcast(value, 0)
    return told


def _number(environ: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    text = environ.get(name)
    if text is None and otherwise is not None:
        return otherwise
    try:
        return int(text or "")
    except ValueError:
        raise UsageError(f"{name}={shown(text)} in the environment is not a number") from None
