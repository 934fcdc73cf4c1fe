"""How the work is divided: one file a strategy, one row each here."""

from dataclasses import dataclass

from manyhands.core.registry import Entry


@dataclass(frozen=True)
class Strategy(Entry):
    """A row of this axis, with what must be known of a strategy before torch is imported."""

    options: str = "manyhands.strategies.options:none"  # the function that checks its options
    free: bool = False  # workers go at their own pace: work is claimed, and the loss of a worker is survived
    momentum: bool = True  # whether a recipe's own momentum is used; what the user asks for always is


STRATEGIES: dict[str, Strategy] = {
    "single": Strategy(
        "manyhands.strategies.single:Single", "one worker does everything: what the others are judged by"
    ),
    "allreduce": Strategy(
        "manyhands.strategies.data_parallel.allreduce:allreduce",
        "synchronous data parallelism: every worker a share of each batch, gradients summed",
    ),
    "average": Strategy(
        "manyhands.strategies.local_sgd.average:Average",
        "local SGD: every worker trains a copy, the copies are averaged every so many steps",
        "manyhands.strategies.options:average",
    ),
    "server": Strategy(
        "manyhands.strategies.asynchronous.server:server",
        "parameter server: workers push gradients and pull parameters, each at its own pace",
        "manyhands.strategies.options:server",
        free=True,
    ),
    "hogwild": Strategy(
        "manyhands.strategies.asynchronous.hogwild:Hogwild",
        "all workers read and write the same parameters in memory, without locks",
        free=True,
        momentum=False,
    ),
    "layers": Strategy(
        "manyhands.strategies.pipeline.worker:pipeline",
        "consecutive layers on successive workers, one batch at a time: why pipelines exist",
        "manyhands.strategies.options:layers",
    ),
    "pipeline": Strategy(
        "manyhands.strategies.pipeline.worker:pipeline",
        "micro-batches follow each other through stages of the model; replicas of it share the batch",
        "manyhands.strategies.options:pipeline",
    ),
    "sharded": Strategy(
        "manyhands.strategies.sharded.worker:sharded",
        "parameters, gradients and optimizer in shards, gathered layer by layer (FSDP)",
    ),
}
