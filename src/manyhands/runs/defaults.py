"""Fill in what the user left open: workers, strategy, launcher and transport."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhands.core.errors import UsageError
from manyhands.core.registry import launchers, strategies, transports
from manyhands.core.registry.launchers import LAUNCHERS
from manyhands.core.registry.strategies import STRATEGIES, UNKNOWN, StrategyEntry
from manyhands.core.registry.transports import TRANSPORTS
from manyhands.launchers.env.rendezvous import ClusterEnvironment, detect
from manyhands.records.spec import RunSpec

UNEVEN = 65  # samples that `verify` takes: a batch that is not divided evenly is harder to get right


def fill_in(settings: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the settings with workers, strategy, launcher and transport filled in if they are missing.

    The defaults for one worker are `single`, `solo` and `inline`, for several `allreduce`, `shm` and `local`;
    ranks that torchrun, mpirun or Slurm started are used as they are.
    """
    found = detect(os.environ if environ is None else environ)
    chosen = {name: value for name, value in settings.items() if value is not None}
    if found is not None and joins(chosen.get("launcher", launchers.STARTED)):
        chosen["launcher"] = launchers.STARTED
        chosen["workers"] = _started_workers(chosen, found)
    elif joins(chosen.get("launcher")):
        raise UsageError(
            f"launcher {chosen['launcher']} takes the processes that torchrun, mpirun or srun started, and "
            "none of them did (RANK, OMPI_COMM_WORLD_RANK, PMI_RANK and SLURM_PROCID are not set)"
        )
    if "memory" in chosen:
        chosen.setdefault("offload", "auto")
    workers = chosen.get("workers", 1)
    chosen.setdefault("strategy", strategies.ONE_WORKER if workers == 1 else strategies.DATA_PARALLEL)
    ranks = workers + _servers(chosen) if isinstance(workers, int) else workers
    default = launchers.default(ranks, chosen.get("transport"), chosen.get("restarts", 0))
    chosen.setdefault("launcher", default)
    chosen.setdefault("transport", _transport(chosen, ranks, found))
    return chosen


def fill_in_resumed(before: RunSpec, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a resumed run: those it had, but filled in again if the workers change."""
    strategy, given = settings.get("strategy", before.strategy), settings.get("strategy_options", {})
    options = {**(before.strategy_options if strategy == before.strategy else {}), **given}
    here = fill_in(
        {
            "workers": settings.get("workers"),
            "launcher": settings.get("launcher"),
            "strategy": strategy,
            "strategy_options": options,
        }
    )
    workers = here.get("workers", before.workers)
    unchanged = workers == before.workers and strategy == before.strategy
    if unchanged and not joins(here.get("launcher")) and not joins(before.launcher):
        stored = {"transport": before.transport, "launcher": before.launcher, "strategy": strategy}
        return {**stored, "workers": workers, **settings, "strategy_options": options}
    if before.traits.one_worker and workers != 1:
        strategy = settings.get("strategy", strategies.DATA_PARALLEL)
    return fill_in({**settings, "strategy": strategy, "workers": workers, "strategy_options": options})


def leads(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process writes and prints: all do, except ranks 1, 2, ... of torchrun and others."""
    found = detect(os.environ if environ is None else environ)
    return found is None or found.rank == 0


def joins(launcher: Any) -> bool:
    """Whether a launcher uses ranks that another program started."""
    return isinstance(launcher, str) and launcher in LAUNCHERS and LAUNCHERS[launcher].already_started


def uses_cuda(device: str) -> bool:
    """Whether the model will be on a GPU; torch is asked only if there may be one."""
    if device == "cpu" or not Path("/dev/nvidiactl").exists():
        return device == "cuda"
    from manyhands.devices.device import count

    return count() > 0


def _traits(chosen: Mapping[str, Any]) -> StrategyEntry:
    name = chosen.get("strategy")
    return STRATEGIES.get(name, UNKNOWN) if isinstance(name, str) else UNKNOWN


def _servers(chosen: Mapping[str, Any]) -> int:
    """The number of server ranks; a value that is not a number is refused when options are checked."""
    if not _traits(chosen).serves:
        return 0
    try:
        return max(1, int(chosen.get("strategy_options", {}).get("servers", 1)))
    except (AttributeError, TypeError, ValueError, OverflowError):
        return 1


def _started_workers(chosen: Mapping[str, Any], found: ClusterEnvironment) -> int:
    """The number of workers among the ranks that were started."""
    workers, servers = chosen.get("workers"), _servers(chosen)
    if servers >= found.size:
        raise UsageError(
            f"strategy {chosen['strategy']} needs server ranks and at least one worker, but {found.starter} "
            f"started {found.size} and servers is {servers}: no rank is left for a worker"
        )
    if workers is not None and workers + servers != found.size:
        serving = f" and servers is {servers}" if servers else ""
        raise UsageError(f"workers is {workers}{serving}, but {found.starter} started {found.size}")
    return int(found.size) - servers


def _transport(chosen: Mapping[str, Any], ranks: int, found: ClusterEnvironment | None) -> str:
    """The default transport."""
    traits, launcher = _traits(chosen), chosen["launcher"]
    if ranks == 1:
        return transports.ONE_RANK
    if isinstance(launcher, str) and launcher in LAUNCHERS and LAUNCHERS[launcher].transport:
        return LAUNCHERS[launcher].transport
    one_host = found is None or found.one_host
    if own := [name for name in traits.transports if one_host or TRANSPORTS[name].hosts]:
        return own[0]
    if not traits.host_memory and uses_cuda(chosen.get("device", "auto")):
        return transports.for_gpus()[0]
    # averaging models needs only messages: under mpirun they go over MPI
    if found is None or (found.one_host and not (traits.averaging and transports.is_of(found.starter))):
        return transports.ONE_HOST
    return transports.for_hosts(found.starter)
