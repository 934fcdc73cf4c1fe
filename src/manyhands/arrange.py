"""Who does the work and how they talk, where the user left it open; and the combinations that cannot work."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from manyhands.errors import UsageError
from manyhands.launchers.rendezvous import Found, detect
from manyhands.spec import RunSpec


def arrange(settings: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The settings with workers, strategy, launcher and transport filled in where they are missing.

    One worker is `single`, `solo`, `inline`. Several are `allreduce` on `shm`, started by `local`; the ranks
    of torchrun, mpirun or Slurm are taken as they are.
    """
    found = detect(os.environ if environ is None else environ)
    chosen = {name: value for name, value in settings.items() if value is not None}
    if found is not None and chosen.get("launcher", "env") == "env":
        chosen["launcher"] = "env"
        chosen["workers"] = _agreed(chosen.get("workers"), found)
    elif chosen.get("launcher") == "env":
        raise UsageError(
            "launcher env takes the processes that torchrun, mpirun or srun started, and none of them did "
            "(RANK, OMPI_COMM_WORLD_RANK, PMI_RANK and SLURM_PROCID are not set)"
        )
    workers = chosen.get("workers", 1)
    alone = workers == 1 and chosen.get("strategy", "single") == "single"
    chosen.setdefault("strategy", "single" if alone else "allreduce")
    chosen.setdefault("launcher", _launcher(workers, chosen))
    chosen.setdefault("transport", _transport(chosen, workers, found))
    return chosen


def leads(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process is the one that speaks: all are, but ranks 1, 2, ... of torchrun and its like."""
    found = detect(os.environ if environ is None else environ)
    return found is None or found.rank == 0


def rearrange(before: RunSpec, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that goes on: what it had, but arranged anew where the workers change."""
    stored = {"strategy": before.strategy, "transport": before.transport, "launcher": before.launcher}
    here = arrange({"workers": settings.get("workers"), "launcher": settings.get("launcher")})
    workers = here.get("workers", before.workers)
    if workers == before.workers and here.get("launcher") != "env" and before.launcher != "env":
        return {**stored, "workers": workers, **settings}
    strategy = "allreduce" if before.strategy == "single" and workers != 1 else before.strategy
    return arrange({"strategy": strategy, **settings, "workers": workers})


def check_arrangement(spec: RunSpec) -> None:
    """Refuse what cannot work, before anything starts."""
    workers, transport, launcher = spec.workers, spec.transport, spec.launcher
    if spec.strategy == "single" and workers != 1:
        raise UsageError(f"strategy single has one worker, but workers is {workers}")
    if transport == "threads":
        raise UsageError(
            "transport threads joins workers inside one process, for tests; between processes use shm, "
            "torch or mpi"
        )
    if transport == "solo" and workers != 1:
        raise UsageError(f"transport solo has one rank, but workers is {workers}: use shm, torch or mpi")
    if launcher == "inline" and workers != 1:
        raise UsageError(f"launcher inline runs one worker, but workers is {workers}: use local")
    if transport == "mpi" or launcher == "mpi":
        if find_spec("mpi4py") is None:
            raise UsageError(
                "MPI needs mpi4py and mpirun, which are not installed: pip install 'manyhands[mpi]'"
            )
        if launcher in ("local", "inline"):
            raise UsageError(
                "transport mpi needs workers that mpirun started: use --launcher mpi, or "
                f"mpirun -n {workers} manyhands train ..."
            )
    if transport == "shm" and spec.device == "cuda":
        raise UsageError("transport shm shares main memory, not a GPU's: with --device cuda use torch")
    if spec.restarts and launcher not in ("local", "mpi"):
        raise UsageError(
            f"--restarts starts workers again, which launcher {launcher} cannot: use local or mpi "
            "(torchrun has --max-restarts)"
        )


def _agreed(workers: int | None, found: Found) -> int:
    if workers is not None and workers != found.size:
        raise UsageError(f"workers is {workers}, but {found.starter} started {found.size}")
    return int(found.size)


def _launcher(workers: int, chosen: Mapping[str, Any]) -> str:
    if chosen.get("transport") == "mpi":
        return "mpi"
    # one worker that may be started again must be a process of its own
    return "inline" if workers == 1 and not chosen.get("restarts") else "local"


def _transport(chosen: Mapping[str, Any], workers: int, found: Found | None) -> str:
    if workers == 1:
        return "solo"
    if chosen["launcher"] == "mpi":
        return "mpi"
    if _cuda(chosen.get("device", "auto")):
        return "torch"
    if found is None or found.one_host:
        return "shm"
    return "mpi" if found.starter == "mpirun" and find_spec("mpi4py") is not None else "torch"


def _cuda(device: str) -> bool:
    """Whether the model will be on a GPU; torch is asked only where there may be one."""
    if device == "cpu" or not Path("/dev/nvidiactl").exists():
        return device == "cuda"
    import torch

    return torch.cuda.is_available()
