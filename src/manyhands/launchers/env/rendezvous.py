"""Rendezvous: which program started this process, as which rank, and how the ranks of its job connect.

`detect` reads environment variables and nothing else. How ranks find the address and the key of rank 0:

    any, one host     in a file in a folder that only this user can open, named after the job: an address that
                      no other host can reach, and a random key
    mpirun, hosts     address and a random key, broadcast by mpi4py
    torchrun, hosts   MASTER_ADDR, and MASTER_PORT + 1 (torchrun's own agent listens at MASTER_PORT)
    Slurm, hosts      MASTER_ADDR or the first host of the step, and a port made from the job's number
    MANYHANDS_PORT    replaces the port

A process that knows the key can run code as this user. torchrun and Slurm carry no secret between hosts, so
the user must: MANYHANDS_KEY, the same everywhere; without it rank 0 does not listen (docs/security.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from manyhands.core.addresses import MASTER, is_loopback
from manyhands.core.atomic_files import open_regular
from manyhands.core.errors import UsageError, shown

PORT, KEY = "MANYHANDS_PORT", "MANYHANDS_KEY"
MIN_SECRET = 16  # characters of a user's key
MAX_FILE = 4096  # characters of a rendezvous file
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Starter = Literal["torchrun", "mpirun", "slurm"]


class ClusterEnvironment(NamedTuple):
    """One rank of a job that torchrun, mpirun or Slurm started."""

    starter: Starter
    rank: int
    size: int
    local_rank: int
    local_size: int  # 0: unknown
    job_id: str  # differs from other jobs of the same user
    address: str = ""  # `host:port` if the starter determines it; empty: by file or broadcast

    @property
    def one_host(self) -> bool:
        """Whether all ranks are known to be on this host."""
        return self.local_size == self.size

    @property
    def meets_here(self) -> bool:
        """Whether the ranks find each other without leaving this host."""
        return self.one_host or is_loopback(self.address.rpartition(":")[0])


def detect(environ: Mapping[str, str]) -> ClusterEnvironment | None:
    """The job that this process is a rank of; None if it was started alone."""
    return _torchrun(environ) or _open_mpi(environ) or _slurm(environ) or _pmi(environ)


def _torchrun(environ: Mapping[str, str]) -> ClusterEnvironment | None:
    if not {"RANK", "WORLD_SIZE"} <= environ.keys():
        return None
    if PORT not in environ and not {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        return None
    host = environ.get("MASTER_ADDR", "127.0.0.1")
    port = _number(environ, PORT) if PORT in environ else _number(environ, "MASTER_PORT") + 1
    job = ":".join(environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"))
    return ClusterEnvironment(
        "torchrun",
        _number(environ, "RANK"),
        _number(environ, "WORLD_SIZE"),
        _number(environ, "LOCAL_RANK", 0),
        _number(environ, "LOCAL_WORLD_SIZE", 0),
        f"{job}:{host}:{port}",
        f"{host}:{port}",
    )


def _open_mpi(environ: Mapping[str, str]) -> ClusterEnvironment | None:
    if not {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"} <= environ.keys():
        return None
    return ClusterEnvironment(
        "mpirun",
        _number(environ, "OMPI_COMM_WORLD_RANK"),
        _number(environ, "OMPI_COMM_WORLD_SIZE"),
        _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
        _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", 0),
        environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or "",
    )


def _pmi(environ: Mapping[str, str]) -> ClusterEnvironment | None:
    """MPICH, Intel MPI and others that start ranks with Hydra."""
    if not {"PMI_RANK", "PMI_SIZE"} <= environ.keys():
        return None
    return ClusterEnvironment(
        "mpirun",
        _number(environ, "PMI_RANK"),
        _number(environ, "PMI_SIZE"),
        _number(environ, "MPI_LOCALRANKID", 0),
        _number(environ, "MPI_LOCALNRANKS", 0),
        environ.get("PMI_JOBID") or environ.get("PMI_ID_JOB") or "",
    )


def _slurm(environ: Mapping[str, str]) -> ClusterEnvironment | None:
    """A step of srun; the shell of sbatch is not one, whatever the size of its allocation."""
    size = _number(environ, "SLURM_STEP_NUM_TASKS", 1)
    if size < 2 or "SLURM_PROCID" not in environ:
        return None
    hosts = nodes(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
    job = f"{environ.get('SLURM_JOB_ID', '0')}.{environ.get('SLURM_STEP_ID', '0')}"
    by_job = 20_000 + int(hashlib.sha256(job.encode()).hexdigest(), 16) % 10_000
    port = _number(environ, PORT, by_job)
    return ClusterEnvironment(
        "slurm",
        _number(environ, "SLURM_PROCID"),
        size,
        _number(environ, "SLURM_LOCALID", 0),
        size if len(hosts) < 2 else 0,
        f"slurm-{job}",
        "" if len(hosts) < 2 else f"{environ.get(MASTER) or hosts[0]}:{port}",
    )


def nodes(text: str) -> list[str]:
    """Expand Slurm's list of host names: `node[01-03,07],x1` is node01, node02, node03, node07 and x1."""
    return [host for part in _split(text) for host in _expand(part)]


def _split(text: str) -> list[str]:
    """Split at the commas outside brackets."""
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


def key_of(environ: Mapping[str, str]) -> bytes:
    """The key of a job whose starter carries none between hosts: made from the user's secret."""
    secret = environ.get(KEY, "")
    if len(secret) < MIN_SECRET:
        found = f"{KEY} has {len(secret)} characters" if secret else f"{KEY} is not set"
        raise UsageError(
            f"workers on several hosts need a shared secret of at least {MIN_SECRET} characters, and "
            f"{found}: set it to the same value on every host "
            "(python -c 'import secrets; print(secrets.token_hex(32))')"
        )
    return hashlib.sha256(f"manyhands:{secret}".encode()).digest()


def rendezvous_file(cluster: ClusterEnvironment) -> Path:
    """The file by which rank 0 of a job on one host tells the others its address and key."""
    # If the starter names no job: the ranks on this host have the same parent.
    name = re.sub(r"[^\w.-]", "_", cluster.job_id or f"parent-{os.getppid()}")
    return _private_folder() / f"manyhands-{name}.json"


def write_rendezvous(cluster: ClusterEnvironment, address: str, key: bytes) -> Path:
    """Write the rendezvous file; returns its path."""
    while True:
        path = rendezvous_file(cluster)
        with contextlib.suppress(FileNotFoundError):  # another job just ended and removed the folder
            write_file(path, address, key)
            return path


def write_file(path: Path, address: str, key: bytes) -> None:
    """Write address and key, readable by this user only, and atomically."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # mode 600
    with os.fdopen(descriptor, "w") as file:
        json.dump({"address": address, "key": key.hex()}, file)
    Path(name).replace(path)


def read_file(path: Path) -> tuple[str, bytes] | None:
    """Address and key, if rank 0 has written them; a file of another user is ignored."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with os.fdopen(open_regular(path)) as file:
            about = os.fstat(file.fileno())
            if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
                return None
            content = json.loads(file.read(MAX_FILE))
        return str(content["address"]), bytes.fromhex(content["key"])
    return None


def remove_file(path: Path, address: str) -> None:
    """Remove the file, unless another leader has written its own address there meanwhile."""
    content = read_file(path)
    if content is not None and content[0] == address:
        path.unlink(missing_ok=True)
        if path.parent == _folder_in_temp():
            with contextlib.suppress(OSError):  # other jobs have files there
                path.parent.rmdir()


def broadcast(open_to: Callable[[list[str]], tuple[str, bytes]] | None) -> tuple[str, bytes]:
    """By MPI itself, between hosts: rank 0 gets all host names, and broadcasts its address and key."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UsageError(
            f"workers that mpirun started on several hosts need mpi4py, which cannot be imported ({error}): "
            "pip install 'manyhands[mpi]'"
        ) from None
    hosts: list[str] | None = MPI.COMM_WORLD.gather(socket.gethostname(), 0)
    found: tuple[str, bytes] = MPI.COMM_WORLD.bcast(open_to(hosts or []) if open_to else None, 0)
    return found


def _private_folder() -> Path:
    """A folder that only this user can read and write: the login session's own, or one that is created."""
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    if session and _is_private(Path(session)):
        return Path(session)
    folder = _folder_in_temp()
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():  # any user can create this name there
        raise UsageError(
            f"workers cannot find each other safely: {folder} is not a folder of this user (its owner is "
            f"user {about.st_uid}); remove it, or set TMPDIR to a folder of your own"
        )
    if stat.S_IMODE(about.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder


def _folder_in_temp() -> Path:
    return Path(tempfile.gettempdir()) / f"manyhands-{os.getuid()}"


def _is_private(folder: Path) -> bool:
    try:
        about = folder.stat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(about.st_mode)
        and about.st_uid == os.getuid()
        and not stat.S_IMODE(about.st_mode) & 0o077
        and os.access(folder, os.W_OK)
    )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UsageError(f"{name}={shown(text)} in the environment is not a number") from None
