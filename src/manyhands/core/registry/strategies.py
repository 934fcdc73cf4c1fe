"""One row per strategy: where it lives, its options, and whatever another room must know of it."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.core.registry import Entry
from manyhands.core.registry.strategy_options import (
    AverageOptions,
    LayersOptions,
    PipelineOptions,
    ServerOptions,
    StrategyOptions,
)

ONE_WORKER = "single"  # the null member: the strategy of one worker, and the reference for all others
DATA_PARALLEL = "allreduce"  # the strategy of several workers, unless another one is named


@dataclass(frozen=True, kw_only=True)
class StrategyEntry(Entry):
    """A row of this axis, with what must be known of a strategy before torch is imported."""

    options: type[StrategyOptions] = StrategyOptions

    # how it trains
    one_worker: bool = False  # it has exactly one worker
    asynchronous: bool = False  # workers take work at their own pace, and the loss of a worker is survived
    exact: bool = True  # it makes the steps that one worker makes with the same batch
    averaging: bool = False  # workers train models of their own and average them
    serves: bool = False  # ranks beside the workers hold the parameters: as many as the option `servers` says
    staged: bool = False  # each worker has a part of the model: as many parts as the option `stages` says
    serial: bool = False  # one worker computes at a time
    interval: str = ""  # the option that says how many steps lie between two exchanges

    # what it supports
    momentum: bool = True  # the recipe's own momentum; a momentum that the user sets is always used
    accumulate: bool = True
    noise_scale: bool = False  # gradients of parts of a batch and of the whole are seen
    sync_batchnorm: bool = False
    offload: bool = True  # with several workers
    scope: str = "model"  # what of a model one optimizer sees: all of it, whole `parameters`, or `elements`
    autotuned: bool = False  # `--workers auto` may choose it

    # where it runs
    transports: tuple[str, ...] = ()  # those that several workers can use; empty: all
    transport_reason: str = ""  # why no other, about `{transport}`
    host_memory: bool = False  # parameters stay in main memory, also where there is a GPU

    check: str = ""  # `module:function(spec, task, recipe)` that refuses models and recipes it cannot train


UNKNOWN = StrategyEntry(where="", says="a strategy that this version does not have", exact=False)

STRATEGIES: dict[str, StrategyEntry] = {
    "single": StrategyEntry(
        where="manyhands.strategies.single:Single",
        says="one worker does everything: the reference for all other strategies",
        one_worker=True,
        noise_scale=True,
        autotuned=True,
    ),
    "allreduce": StrategyEntry(
        where="manyhands.strategies.data_parallel.allreduce:allreduce",
        says="synchronous data parallelism: workers share each batch, and their gradients are summed",
        noise_scale=True,
        sync_batchnorm=True,
        autotuned=True,
        scope="parameters",
    ),
    "average": StrategyEntry(
        where="manyhands.strategies.local_sgd.average:Average",
        says="local SGD: every worker trains its own copy, and the copies are averaged every few steps",
        options=AverageOptions,
        exact=False,
        averaging=True,
        interval="every",
    ),
    "server": StrategyEntry(
        where="manyhands.strategies.asynchronous.parameter_server:server",
        says="parameter server: workers push gradients and pull parameters, each at its own pace",
        options=ServerOptions,
        asynchronous=True,
        exact=False,
        serves=True,
        interval="push_every",
        check="manyhands.strategies.asynchronous.server_checks:check",
    ),
    "hogwild": StrategyEntry(
        where="manyhands.strategies.asynchronous.hogwild:Hogwild",
        says="all workers read and write the same parameters in memory, without locks",
        asynchronous=True,
        exact=False,
        momentum=False,
        transports=("shm",),
        transport_reason="writes into memory that all workers share, which transport {transport} has not: "
        "use shm, or strategy server between hosts",
        host_memory=True,
    ),
    "layers": StrategyEntry(
        where="manyhands.strategies.pipeline.worker:pipeline",
        says="consecutive layers on successive workers, one batch at a time: the baseline for pipelines",
        options=LayersOptions,
        staged=True,
        serial=True,
        accumulate=False,
        scope="parameters",
        check="manyhands.strategies.pipeline.stage_checks:check",
    ),
    "pipeline": StrategyEntry(
        where="manyhands.strategies.pipeline.worker:pipeline",
        says="micro-batches follow each other through stages of the model; replicas share the batch",
        options=PipelineOptions,
        staged=True,
        accumulate=False,
        scope="parameters",
        check="manyhands.strategies.pipeline.stage_checks:check",
    ),
    "sharded": StrategyEntry(
        where="manyhands.strategies.sharded.worker:sharded",
        says="parameters, gradients and optimizer state in shards, gathered layer by layer (FSDP)",
        offload=False,
        scope="elements",
        transports=("torch",),
        transport_reason="is torch's fully_shard, which speaks through torch.distributed: transport "
        "{transport} cannot carry it, use torch",
    ),
}


def having(trait: str) -> list[str]:
    """The strategies of which this is true."""
    return [name for name, row in STRATEGIES.items() if getattr(row, trait)]
