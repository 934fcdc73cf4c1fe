"""Who does the work and how they talk, where the user left it open; and the combinations that cannot work."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from manyhands.core import environment, formatting
from manyhands.core.errors import UsageError
from manyhands.launchers.env.rendezvous import ClusterEnvironment, detect
from manyhands.records.spec import RunSpec
from manyhands.strategies import options


def arrange(settings: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The settings with workers, strategy, launcher and transport filled in where they are missing.

    One worker is `single`, `solo`, `inline`. Several are `allreduce` on `shm`, started by `local`; the ranks
    of torchrun, mpirun or Slurm are taken as they are.
    """
    found = detect(os.environ if environ is None else environ)
    chosen = {name: value for name, value in settings.items() if value is not None}
    if found is not None and chosen.get("launcher", "env") == "env":
        chosen["launcher"] = "env"
        chosen["workers"] = _agreed(chosen.get("workers"), _servers(chosen), found)
    elif chosen.get("launcher") == "env":
        raise UsageError(
            "launcher env takes the processes that torchrun, mpirun or srun started, and none of them did "
            "(RANK, OMPI_COMM_WORLD_RANK, PMI_RANK and SLURM_PROCID are not set)"
        )
    if "memory" in chosen:
        chosen.setdefault("offload", "auto")
    workers = chosen.get("workers", 1)
    alone = workers == 1 and chosen.get("strategy", "single") == "single"
    chosen.setdefault("strategy", "single" if alone else "allreduce")
    ranks = workers + _servers(chosen) if isinstance(workers, int) else workers
    chosen.setdefault("launcher", _launcher(ranks, chosen))
    chosen.setdefault("transport", _transport(chosen, ranks, found))
    return chosen


def _servers(chosen: Mapping[str, Any]) -> int:
    """Ranks that serve and do not train; what is no number is refused where options are checked."""
    if chosen.get("strategy") != "server":
        return 0
    try:
        return max(1, int(chosen.get("strategy_options", {}).get("servers", 1)))
    except (AttributeError, TypeError, ValueError, OverflowError):
        return 1


def leads(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process is the one that speaks: all are, but ranks 1, 2, ... of torchrun and its like."""
    found = detect(os.environ if environ is None else environ)
    return found is None or found.rank == 0


def rearrange(before: RunSpec, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that goes on: what it had, but arranged anew where the workers change."""
    strategy, given = settings.get("strategy", before.strategy), settings.get("strategy_options", {})
    options = {**(before.strategy_options if strategy == before.strategy else {}), **given}
    here = arrange(
        {
            "workers": settings.get("workers"),
            "launcher": settings.get("launcher"),
            "strategy": strategy,
            "strategy_options": options,
        }
    )
    workers = here.get("workers", before.workers)
    same = workers == before.workers and strategy == before.strategy
    if same and here.get("launcher") != "env" and before.launcher != "env":
        stored = {"transport": before.transport, "launcher": before.launcher, "strategy": strategy}
        return {**stored, "workers": workers, **settings, "strategy_options": options}
    if before.strategy == "single" and workers != 1:
        strategy = settings.get("strategy", "allreduce")
    return arrange({**settings, "strategy": strategy, "workers": workers, "strategy_options": options})


def check_system(launcher: str) -> None:
    """Several processes are looked after by means that Linux has; one worker needs none of them."""
    needs = {"inline": (), "local": ("waitid",)}.get(launcher, ("register_at_fork",))
    if missing := [f"os.{name}" for name in needs if not hasattr(os, name)]:
        raise UsageError(
            f"launcher {launcher} needs Linux: Python on this system ({sys.platform}) has no {missing[0]}; "
            "one worker trains here, without --workers"
        )


def check_arrangement(spec: RunSpec) -> None:
    """Refuse what cannot work, before anything starts."""
    check_system(spec.launcher)
    workers, transport, launcher = spec.workers, spec.transport, spec.launcher
    _check_size(spec)
    if spec.strategy == "single" and workers != 1:
        raise UsageError(f"strategy single has one worker, but workers is {workers}")
    if transport == "threads":
        raise UsageError(
            "transport threads joins workers inside one process, for tests; between processes use shm, "
            "torch or mpi"
        )
    serving = f" and servers is {spec.servers}" if spec.servers else ""
    if transport == "solo" and spec.ranks != 1:
        raise UsageError(
            f"transport solo has one rank, but workers is {workers}{serving}: use shm, torch or mpi"
        )
    if launcher == "inline" and spec.ranks != 1:
        raise UsageError(f"launcher inline runs one rank, but workers is {workers}{serving}: use local")
    if transport == "mpi" or launcher == "mpi":
        if find_spec("mpi4py") is None:
            raise UsageError(
                "MPI needs mpi4py and mpirun, which are not installed: pip install 'manyhands[mpi]'"
            )
        if launcher in ("local", "inline"):
            raise UsageError(
                "transport mpi needs workers that mpirun started: use --launcher mpi, or "
                f"mpirun -n {spec.ranks} manyhands train ..."
            )
    _check_strategy(spec)
    _check_noise_scale(spec)
    # hogwild, where nothing is said, trains on the CPU
    if transport == "shm" and (_cuda(spec.device) if spec.strategy != "hogwild" else spec.device == "cuda"):
        raise UsageError("transport shm shares main memory, not a GPU's: use torch, or --device cpu")
    if spec.restarts and launcher not in ("local", "mpi"):
        raise UsageError(
            f"--restarts starts workers again, which launcher {launcher} cannot: use local or mpi "
            "(torchrun has --max-restarts)"
        )


def most_ranks() -> int:
    """Processes that this machine is asked to start at the most: many more than it has cores for."""
    return min(1024, max(128, 16 * environment.cores()))


def most_threads() -> int:
    """The same of a worker's threads, which cost far more than they bring beyond the cores."""
    return max(64, 4 * environment.cores())


def _check_size(spec: RunSpec) -> None:
    """What this machine would only choke on."""
    cores = formatting.plural(environment.cores(), "core")
    if spec.threads is not None and spec.threads > most_threads():
        raise UsageError(
            f"threads must be at most {most_threads():,} on this machine of {cores}, got {spec.threads:,}"
        )
    if spec.launcher == "local" and spec.ranks > most_ranks():
        serving = f" and servers is {spec.servers:,}" if spec.servers else ""
        raise UsageError(
            f"launcher local starts at most {most_ranks():,} ranks on this machine of {cores}, but workers "
            f"is {spec.workers:,}{serving}: use fewer, or start them on several machines with torchrun"
        )


def _check_strategy(spec: RunSpec) -> None:
    """What a strategy asks of the arrangement."""
    if spec.strategy == "hogwild" and spec.transport not in ("shm", "solo"):
        raise UsageError(
            f"strategy hogwild writes into memory that all workers share, which transport {spec.transport} "
            "has not: use shm, or strategy server between hosts"
        )
    backup = spec.strategy_options.get("backup")
    if spec.strategy == "server" and backup is not None and int(backup) >= spec.workers:
        raise UsageError(
            f"strategy server: backup {backup} of {spec.workers} workers leaves nobody to wait for"
        )
    elasticity = spec.strategy_options.get("elasticity")
    if spec.strategy == "average" and elasticity is not None and float(elasticity) * spec.workers > 1:
        raise UsageError(
            f"strategy average: elasticity {elasticity} of {spec.workers} workers moves their center further "
            f"than they are away from it: at most {1 / spec.workers:.3g}"
        )
    if spec.strategy == "sharded" and spec.transport not in ("torch", "solo"):
        raise UsageError(
            f"strategy sharded is torch's fully_shard, which speaks through torch.distributed: transport "
            f"{spec.transport} cannot carry it, use torch"
        )
    _check_stages(spec)
    if spec.strategy == "sharded" and spec.offload != "none" and spec.workers > 1:
        raise UsageError(
            "--offload cannot tell what sharded gathers from activations: use allreduce or pipeline with it, "
            f"or sharded without offload {spec.offload}"
        )
    if spec.memory is not None and spec.offload != "auto":
        raise UsageError(
            "--memory says how much a worker may use, which offload auto keeps to, but offload is "
            f"{spec.offload}"
        )
    if spec.sync_batchnorm and spec.strategy != "allreduce" and spec.workers > 1:
        raise UsageError(
            f"--sync-batchnorm needs workers that see the whole model and step together: use allreduce, not "
            f"{spec.strategy}"
        )


def _check_noise_scale(spec: RunSpec) -> None:
    if not spec.noise_scale:
        return
    if spec.strategy not in ("single", "allreduce"):
        raise UsageError(
            "--noise-scale compares gradients of parts of a batch with the whole, which single and allreduce "
            f"see, not {spec.strategy}"
        )
    if spec.workers * spec.accumulate == 1:
        raise UsageError(
            "--noise-scale compares gradients of parts of a batch with the whole, but here a batch is one "
            "part: use --accumulate 2, or more workers"
        )


def _check_stages(spec: RunSpec) -> None:
    """What a model in stages asks of the arrangement."""
    if spec.strategy not in ("layers", "pipeline"):
        return
    if spec.accumulate > 1:
        instead = f": use --micro-batches {spec.accumulate}" if spec.strategy == "pipeline" else ""
        raise UsageError(f"strategy {spec.strategy} does not accumulate{instead}")
    if spec.workers % spec.stages:
        raise UsageError(
            f"{spec.workers} workers cannot be divided into pipelines of {spec.stages} stages: use "
            f"{spec.stages}, {2 * spec.stages}, {3 * spec.stages}, ... workers"
        )
    chosen = options.build(spec.strategy, spec.strategy_options)
    assert isinstance(chosen, options.PipelineOptions)
    if chosen.cut and len(chosen.cut) != spec.stages - 1:
        made = formatting.plural(len(chosen.cut) + 1, "stage")
        raise UsageError(
            f"a cut at {', '.join(map(str, chosen.cut))} makes {made}, but there are {spec.stages}"
        )
    if chosen.recompute and spec.stages == 1:
        raise UsageError(
            "--recompute keeps only the inputs of each stage, but here the model is in one piece: --offload "
            "auto recomputes where it pays"
        )


def _agreed(workers: int | None, servers: int, found: ClusterEnvironment) -> int:
    if servers >= found.size:
        raise UsageError(
            f"strategy server needs ranks that serve and one to work, but {found.starter} started "
            f"{found.size} and servers is {servers}: nobody would be left to work"
        )
    if workers is not None and workers + servers != found.size:
        serving = f" and servers is {servers}" if servers else ""
        raise UsageError(f"workers is {workers}{serving}, but {found.starter} started {found.size}")
    return int(found.size) - servers


def _launcher(workers: int, chosen: Mapping[str, Any]) -> str:
    if chosen.get("transport") == "mpi":
        return "mpi"
    # one worker that may be started again must be a process of its own
    return "inline" if workers == 1 and not chosen.get("restarts") else "local"


def _transport(chosen: Mapping[str, Any], workers: int, found: ClusterEnvironment | None) -> str:
    if workers == 1:
        return "solo"
    if chosen["launcher"] == "mpi":
        return "mpi"
    if chosen["strategy"] == "sharded":  # FSDP speaks through torch.distributed
        return "torch"
    if chosen["strategy"] != "hogwild" and _cuda(chosen.get("device", "auto")):
        return "torch"
    # weight averaging is the message-passing model: under mpirun its messages are MPI's
    passing = chosen["strategy"] == "average" and found is not None and found.starter == "mpirun"
    if (found is None or found.one_host) and not passing:
        return "shm"
    assert found is not None
    return "mpi" if found.starter == "mpirun" and find_spec("mpi4py") is not None else "torch"


def _cuda(device: str) -> bool:
    """Whether the model will be on a GPU; torch is asked only where there may be one."""
    if device == "cpu" or not Path("/dev/nvidiactl").exists():
        return device == "cuda"
    from manyhands.devices.device import count

    return count() > 0
