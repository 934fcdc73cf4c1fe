"""Under which starter this process runs, as which rank, and where the ranks of its job meet.

`detect` reads environment variables and nothing else. How the meeting place is found:

    any, one host     a note in a folder that only this user can look into, named after the job: an address
                      that no other host can reach, and a random key
    mpirun, hosts     address and a random key, broadcast by mpi4py
    torchrun, hosts   MASTER_ADDR, and MASTER_PORT + 1 (torchrun's own agent listens at MASTER_PORT)
    Slurm, hosts      MASTER_ADDR or the first host of the step, and a port made from the job's number
    MANYHANDS_PORT    replaces the port

Whoever knows the key can run code as this user. So where the starter carries no secret between hosts, the
user must: MANYHANDS_KEY, the same everywhere, or nobody listens (docs/security.md).
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
SECRET = 16  # characters that a user's key must have
NOTE = 4096  # characters that a note may have
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Starter = Literal["torchrun", "mpirun", "slurm"]


class StarterInfo(NamedTuple):
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

    @property
    def meets_here(self) -> bool:
        """Whether all ranks find each other without leaving this host."""
        return self.one_host or is_loopback(self.address.rpartition(":")[0])


def detect(environ: Mapping[str, str]) -> StarterInfo | None:
    """The job this process is a rank of, or None when it is a process of its own."""
    return _torchrun(environ) or _open_mpi(environ) or _slurm(environ) or _pmi(environ)


def _torchrun(environ: Mapping[str, str]) -> StarterInfo | None:
    if not {"RANK", "WORLD_SIZE"} <= environ.keys():
        return None
    if PORT not in environ and not {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        return None
    host = environ.get("MASTER_ADDR", "127.0.0.1")
    port = _number(environ, PORT) if PORT in environ else _number(environ, "MASTER_PORT") + 1
    job = ":".join(environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"))
    return StarterInfo(
        "torchrun",
        _number(environ, "RANK"),
        _number(environ, "WORLD_SIZE"),
        _number(environ, "LOCAL_RANK", 0),
        _number(environ, "LOCAL_WORLD_SIZE", 0),
        f"{job}:{host}:{port}",
        f"{host}:{port}",
    )


def _open_mpi(environ: Mapping[str, str]) -> StarterInfo | None:
    if not {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"} <= environ.keys():
        return None
    return StarterInfo(
        "mpirun",
        _number(environ, "OMPI_COMM_WORLD_RANK"),
        _number(environ, "OMPI_COMM_WORLD_SIZE"),
        _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
        _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", 0),
        environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or "",
    )


def _pmi(environ: Mapping[str, str]) -> StarterInfo | None:
    """MPICH, Intel MPI and others that start ranks by way of Hydra."""
    if not {"PMI_RANK", "PMI_SIZE"} <= environ.keys():
        return None
    return StarterInfo(
        "mpirun",
        _number(environ, "PMI_RANK"),
        _number(environ, "PMI_SIZE"),
        _number(environ, "MPI_LOCALRANKID", 0),
        _number(environ, "MPI_LOCALNRANKS", 0),
        environ.get("PMI_JOBID") or environ.get("PMI_ID_JOB") or "",
    )


def _slurm(environ: Mapping[str, str]) -> StarterInfo | None:
    """A step of srun; the shell that sbatch gives is not one, whatever the size of its allocation."""
    size = _number(environ, "SLURM_STEP_NUM_TASKS", 1)
    if size < 2 or "SLURM_PROCID" not in environ:
        return None
    hosts = nodes(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
    job = f"{environ.get('SLURM_JOB_ID', '0')}.{environ.get('SLURM_STEP_ID', '0')}"
    by_job = 20_000 + int(hashlib.sha256(job.encode()).hexdigest(), 16) % 10_000
    port = _number(environ, PORT, by_job)
    return StarterInfo(
        "slurm",
        _number(environ, "SLURM_PROCID"),
        size,
        _number(environ, "SLURM_LOCALID", 0),
        size if len(hosts) < 2 else 0,
        f"slurm-{job}",
        "" if len(hosts) < 2 else f"{environ.get(MASTER) or hosts[0]}:{port}",
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


def key_of(environ: Mapping[str, str]) -> bytes:
    """The key of a job whose starter carries none between hosts: the user's secret."""
    secret = environ.get(KEY, "")
    if len(secret) < SECRET:
        found = f"{KEY} has {len(secret)} characters" if secret else f"{KEY} is not set"
        raise UsageError(
            f"workers on several hosts know each other by a secret of {SECRET} characters or more, and "
            f"{found}: set it to the same on every host (python -c 'import secrets; "
            "print(secrets.token_hex(32))')"
        )
    return hashlib.sha256(f"manyhands:{secret}".encode()).digest()


def meeting_file(found: StarterInfo) -> Path:
    """Where the leader of a job on one host leaves a note."""
    # A starter that names no job: its ranks on this host have one parent.
    name = re.sub(r"[^\w.-]", "_", found.job or f"parent-{os.getppid()}")
    return _private_folder() / f"manyhands-{name}.json"


def invite(found: StarterInfo, address: str, key: bytes) -> Path:
    """Leave a note for the others; returns where."""
    while True:
        path = meeting_file(found)
        with contextlib.suppress(FileNotFoundError):  # another job was over just now, and removed the folder
            leave_note(path, address, key)
            return path


def leave_note(path: Path, address: str, key: bytes) -> None:
    """For this user only, and whole or not at all."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # mode 600
    with os.fdopen(descriptor, "w") as file:
        json.dump({"address": address, "key": key.hex()}, file)
    Path(name).replace(path)


def read_note(path: Path) -> tuple[str, bytes] | None:
    """What the leader left, if it has; a note by another user is nobody's."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with os.fdopen(open_regular(path)) as file:
            about = os.fstat(file.fileno())
            if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
                return None
            note = json.loads(file.read(NOTE))
        return str(note["address"]), bytes.fromhex(note["key"])
    return None


def remove_note(path: Path, address: str) -> None:
    """Unless another leader has left its own there meanwhile."""
    note = read_note(path)
    if note is not None and note[0] == address:
        path.unlink(missing_ok=True)
        if path.parent == _folder_in_temp():
            with contextlib.suppress(OSError):  # others have notes there
                path.parent.rmdir()


def broadcast(tell: Callable[[list[str]], tuple[str, bytes]] | None) -> tuple[str, bytes]:
    """By MPI itself, between hosts: rank 0 hears where all are, and says by what to find it."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UsageError(
            f"workers on several hosts of mpirun meet by mpi4py, which cannot be imported ({error}): "
            "pip install 'manyhands[mpi]'"
        ) from None
    hosts: list[str] | None = MPI.COMM_WORLD.gather(socket.gethostname(), 0)
    told: tuple[str, bytes] = MPI.COMM_WORLD.bcast(tell(hosts or []) if tell else None, 0)
    return told


def _private_folder() -> Path:
    """Only this user can look into it or put something there: the session's own, or one that is made."""
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    if session and _is_private(Path(session)):
        return Path(session)
    folder = _folder_in_temp()
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():  # anybody can take a name there
        raise UsageError(
            f"workers cannot meet in private: {folder} is not a folder of this user (its owner is user "
            f"{about.st_uid}); have it removed, or set TMPDIR to a folder of your own"
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


def _number(environ: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    text = environ.get(name)
    if text is None and otherwise is not None:
        return otherwise
    try:
        return int(text or "")
    except ValueError:
        raise UsageError(f"{name}={shown(text)} in the environment is not a number") from None
