"""One row per transport: where it lives, whom it can connect, and what it needs."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from manyhands.core.registry import Entry

ONE_RANK = "solo"  # the null member
ONE_HOST = "shm"  # the transport of several ranks of one host, unless another one is named


@dataclass(frozen=True, kw_only=True)
class TransportEntry(Entry):
    """A row of this axis, with what must be known of a transport before torch is imported."""

    one_rank: bool = False
    one_process: bool = False  # ranks are threads of one process: for tests
    shared_memory: bool = False  # ranks of one host share main memory, and can do without a rank that is lost
    gpus: bool = False  # it carries the tensors of GPUs
    hosts: bool = False  # it reaches other hosts
    starter: str = ""  # the program that must have started its ranks
    launchers: tuple[str, ...] = ()  # those whose ranks it can connect; empty: all
    launcher_reason: str = ""  # why no other, about `{ranks}`
    package: str = ""  # what must be installed
    package_reason: str = ""  # the sentence if it is not

    @property
    def is_installed(self) -> bool:
        """Whether the package that it needs is there."""
        return not self.package or find_spec(self.package) is not None

    @property
    def joins_processes(self) -> bool:
        """Whether a run with several workers can use it."""
        return not self.one_rank and not self.one_process


TRANSPORTS: dict[str, TransportEntry] = {
    "solo": TransportEntry(
        where="manyhands.transports.solo:SoloTransport",
        says="one worker, without any communication",
        one_rank=True,
    ),
    "threads": TransportEntry(
        where="manyhands.transports.threads:ThreadsTransport",
        says="threads of one process, for tests",
        one_process=True,
    ),
    "shm": TransportEntry(
        where="manyhands.transports.shm.transport:ShmTransport",
        says="processes of one host, through shared memory",
        shared_memory=True,
    ),
    "torch": TransportEntry(
        where="manyhands.transports.torch_:TorchTransport",
        says="torch.distributed: gloo on CPUs, NCCL on CUDA",
        gpus=True,
        hosts=True,
    ),
    "mpi": TransportEntry(
        where="manyhands.transports.mpi:MpiTransport",
        says="MPI, through mpi4py",
        hosts=True,
        starter="mpirun",
        launchers=("mpi", "env"),
        launcher_reason="needs workers that mpirun started: use --launcher mpi, or mpirun -n {ranks} "
        "manyhands train ...",
        package="mpi4py",
        package_reason="MPI needs mpi4py and mpirun, which are not installed: pip install 'manyhands[mpi]'",
    ),
}


def for_hosts(starter: str) -> str:
    """The transport between hosts for ranks that this program started: its own, if that is installed."""
    own = [
        name for name, row in TRANSPORTS.items() if row.hosts and row.starter == starter and row.is_installed
    ]
    return (own or [name for name, row in TRANSPORTS.items() if row.hosts and not row.starter])[0]


def is_of(starter: str) -> bool:
    """Whether there is a transport of this program's own."""
    return any(row.starter == starter for row in TRANSPORTS.values())


def for_gpus() -> list[str]:
    """The transports that carry the tensors of GPUs."""
    return [name for name, row in TRANSPORTS.items() if row.gpus]


def for_processes() -> list[str]:
    """The transports that connect several processes."""
    return [name for name, row in TRANSPORTS.items() if row.joins_processes]
