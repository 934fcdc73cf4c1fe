"""One row per launcher: where it lives, how it starts workers, and what it needs of the system."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.core.registry import Entry

IN_PROCESS = "inline"  # the null member
LOCAL = "local"  # the launcher of several ranks, unless another one is named
STARTED = "env"  # the launcher of ranks that torchrun, mpirun or srun started


@dataclass(frozen=True, kw_only=True)
class LauncherEntry(Entry):
    """A row of this axis, with what must be known of a launcher before any process is started."""

    in_process: bool = False  # one rank, in this process
    already_started: bool = False  # it takes the ranks that another program started
    one_machine: bool = False  # it starts all ranks on this machine
    restarts: bool = False  # it can start a lost worker again
    probes: bool = False  # its ranks can be started for a short measurement before the run
    transport: str = ""  # the transport that comes with it
    start_seconds: float = 2.0  # until the first step: data, model, processes
    system: tuple[str, ...] = ("register_at_fork",)  # functions of `os` that it needs
    package: str = ""  # what must be installed
    package_reason: str = ""  # the sentence if it is not


LAUNCHERS: dict[str, LauncherEntry] = {
    "inline": LauncherEntry(
        where="manyhands.launchers.inline:InlineLauncher",
        says="one worker, in this process",
        in_process=True,
        start_seconds=0.3,
        system=(),
    ),
    "local": LauncherEntry(
        where="manyhands.launchers.local:LocalLauncher",
        says="one process per worker, on this machine",
        one_machine=True,
        restarts=True,
        probes=True,
        start_seconds=1.5,
        system=("waitid",),
    ),
    "env": LauncherEntry(
        where="manyhands.launchers.env.launcher:EnvLauncher",
        says="workers already started by torchrun, mpirun or Slurm",
        already_started=True,
    ),
    "mpi": LauncherEntry(
        where="manyhands.launchers.mpi:MpiLauncher",
        says="one rank of mpirun per worker, on this machine or several",
        restarts=True,
        transport="mpi",
        package="mpi4py",
        package_reason="MPI needs mpi4py and mpirun, which are not installed: pip install 'manyhands[mpi]'",
    ),
}


def for_restarts() -> list[str]:
    """The launchers that can start a lost worker again."""
    return [name for name, row in LAUNCHERS.items() if row.restarts]


def default(ranks: int, transport: str | None, restarts: int) -> str:
    """The launcher where none is named: that of the transport, this process, or one process per rank."""
    with_transport = [name for name, row in LAUNCHERS.items() if row.transport and row.transport == transport]
    if with_transport:
        return with_transport[0]
    # one worker that may be started again must be a process of its own
    return IN_PROCESS if ranks == 1 and not restarts else LOCAL
