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


@dataclass(frozen=True)
class Strategy(Entry):
    """A row of this axis, with what must be known of a strategy before torch is imported."""

    options: type[StrategyOptions] = StrategyOptions
    asynchronous: bool = False  # workers take work at their own pace, and the loss of a worker is survived
    momentum: bool = True  # whether a recipe's own momentum is used; what the user asks for always is


STRATEGIES: dict[str, Strategy] = {
    "single": Strategy(
        "manyhands.strategies.single:Single",
        "one worker does everything: the reference for all other strategies",
    ),
    "allreduce": Strategy(
        "manyhands.strategies.data_parallel.allreduce:allreduce",
        "synchronous data parallelism: every worker computes a share of each batch, gradients are summed",
    ),
    "average": Strategy(
        "manyhands.strategies.local_sgd.average:Average",
        "local SGD: every worker trains its own copy, and the copies are averaged every few steps",
        AverageOptions,
    ),
    "server": Strategy(
        "manyhands.strategies.asynchronous.server:server",
        "parameter server: workers push gradients and pull parameters, each at its own pace",
        ServerOptions,
        asynchronous=True,
    ),
    "hogwild": Strategy(
        "manyhands.strategies.asynchronous.hogwild:Hogwild",
        "all workers read and write the same parameters in memory, without locks",
        asynchronous=True,
        momentum=False,
    ),
    "layers": Strategy(
        "manyhands.strategies.pipeline.worker:pipeline",
        "consecutive layers on successive workers, one batch at a time: the baseline for pipelines",
        LayersOptions,
    ),
    "pipeline": Strategy(
        "manyhands.strategies.pipeline.worker:pipeline",
        "micro-batches follow each other through stages of the model; replicas share the batch",
        PipelineOptions,
    ),
    "sharded": Strategy(
        "manyhands.strategies.sharded.worker:sharded",
        "parameters, gradients and optimizer state in shards, gathered layer by layer (FSDP)",
    ),
}
