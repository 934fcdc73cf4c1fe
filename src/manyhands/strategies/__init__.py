"""How the work is divided: one file a strategy, one row each here."""

from manyhands.axes import Member

STRATEGIES: dict[str, Member] = {
    "single": Member(
        "manyhands.strategies.single:Single", "one worker does everything: what the others are judged by"
    ),
    "allreduce": Member(
        "manyhands.strategies.allreduce:allreduce",
        "synchronous data parallelism: every worker a share of each batch, gradients summed",
    ),
}
