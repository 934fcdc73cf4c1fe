"""The options of each strategy, as plain values: checked before torch is imported (law 10)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from manyhands.core import registry
from manyhands.core.errors import UsageError, shown, unknown
from manyhands.strategies import STRATEGIES

Outer = Literal["mean", "nesterov", "elastic"]
Schedule = Literal["gpipe", "1f1b"]


@dataclass(frozen=True)
class NoOptions:
    """For strategies that have none."""


@dataclass(frozen=True)
class AverageOptions:
    """How often and how the workers' models become one."""

    every: int | str = 16  # steps between two averages, or `epoch`, or `end`
    post_local: bool = False  # an average a step until the rate first decays
    outer: Outer = "mean"
    outer_lr: float = 0.7  # of nesterov, as in DiLoCo
    outer_momentum: float = 0.9
    elasticity: float | None = None  # of elastic: how far a worker and the center move to each other
    average_optimizer: bool | None = None  # the optimizer's state too; none: with mean, not with nesterov

    @property
    def averages_optimizer(self) -> bool:
        """Whether a meeting averages what the optimizers remember; else each worker keeps its own."""
        return self.outer == "mean" if self.average_optimizer is None else self.average_optimizer


@dataclass(frozen=True)
class ServerOptions:
    """Who serves, how often workers push and pull, and what is done about stale gradients."""

    servers: int = 1
    push_every: int = 1
    pull_every: int = 1
    staleness_aware: bool = False
    bound: int | None = None  # steps that a worker may be ahead of the slowest
    backup: int | None = None  # workers whose gradients a synchronous round does not wait for


@dataclass(frozen=True)
class PipelineOptions:
    """Where the model is cut, and how micro-batches go through its stages."""

    stages: int | None = None  # a worker each; none: as many as there are workers
    micro_batches: int | None = None  # of a replica's share of the batch; none: measured before the run
    schedule: Schedule = "1f1b"
    recompute: bool = False  # keep a stage's inputs only, and compute its activations again for backward
    cut: tuple[int, ...] = ()  # the blocks at which later stages begin; none: measured and balanced


Options = NoOptions | AverageOptions | ServerOptions | PipelineOptions


def none() -> NoOptions:
    """There is nothing to choose."""
    return NoOptions()


def average(
    *,
    every: int | str = 16,
    post_local: bool = False,
    outer: Outer = "mean",
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    elasticity: float | None = None,
    average_optimizer: bool | None = None,
) -> AverageOptions:
    """Local SGD: `every` so many steps, once an epoch or once at the end, the workers' models become one.

    `average_optimizer` says whether the optimizer's state (momentum, Adam's moments) is averaged with them or
    stays each worker's own; where it is not given, `mean` averages it and `nesterov`, as DiLoCo, does not.
    """
    whole = isinstance(every, int) and every >= 1
    fits = whole or every in ("epoch", "end")
    _must("average", "every", fits, "a whole number of steps, at least 1, or epoch, or end", every)
    _must("average", "outer_lr", outer_lr > 0, "above 0", outer_lr)
    _must("average", "outer_momentum", 0 <= outer_momentum < 1, "at least 0 and below 1", outer_momentum)
    fits = elasticity is None or 0 < elasticity <= 1
    _must("average", "elasticity", fits, "above 0 and at most 1", elasticity)
    if elasticity is not None and outer != "elastic":
        raise UsageError(f"strategy average: elasticity is for outer elastic, and outer is {outer}")
    if average_optimizer and outer == "elastic":
        raise UsageError(
            "strategy average: average_optimizer does not go with outer elastic, where each worker keeps its "
            "own optimizer state: take outer mean or nesterov"
        )
    if every == "end" and outer != "mean":
        raise UsageError(
            f"strategy average: outer {outer} acts when workers meet during the run, and with every end they "
            "do not: say how often, or take outer mean"
        )
    return AverageOptions(every, post_local, outer, outer_lr, outer_momentum, elasticity, average_optimizer)


def server(
    *,
    servers: int = 1,
    push_every: int = 1,
    pull_every: int = 1,
    staleness_aware: bool = False,
    bound: int | None = None,
    backup: int | None = None,
) -> ServerOptions:
    """A parameter server: some ranks hold the parameters, the others push gradients and pull parameters."""
    for name, value in (("servers", servers), ("push_every", push_every), ("pull_every", pull_every)):
        _must("server", name, value >= 1, "at least 1", value)
    _must("server", "bound", bound is None or bound >= 0, "0 or more steps", bound)
    _must("server", "backup", backup is None or backup >= 0, "0 or more workers", backup)
    if backup is not None:
        for name, given in (
            ("bound", bound is not None),
            ("push_every", push_every > 1),
            ("pull_every", pull_every > 1),
            ("staleness_aware", staleness_aware),
            ("more than one server", servers > 1),
        ):
            if given:
                raise UsageError(f"strategy server: {name} does not go with the synchronous rounds of backup")
    return ServerOptions(servers, push_every, pull_every, staleness_aware, bound, backup)


def layers(*, cut: tuple[int, ...] = ()) -> PipelineOptions:
    """Consecutive layers on successive workers, one batch at a time: all but one of them wait."""
    _check_cut("layers", cut)
    return PipelineOptions(None, 1, "gpipe", False, cut)


def pipeline(
    *,
    stages: int | None = None,
    micro_batches: int | None = None,
    schedule: Schedule = "1f1b",
    recompute: bool = False,
    cut: tuple[int, ...] = (),
) -> PipelineOptions:
    """Micro-batches follow each other through the stages; 1f1b holds fewer of them in memory than gpipe."""
    _must("pipeline", "stages", stages is None or stages >= 1, "at least 1", stages)
    fits = micro_batches is None or micro_batches >= 1
    _must("pipeline", "micro_batches", fits, "at least 1", micro_batches)
    _check_cut("pipeline", cut)
    return PipelineOptions(stages, micro_batches, schedule, recompute, cut)


def _check_cut(strategy: str, cut: tuple[int, ...]) -> None:
    ascends, got = all(a < b for a, b in pairwise((0, *cut))), ", ".join(map(str, cut))
    _must(strategy, "cut", ascends, "block numbers in ascending order, the first at least 1", got)


def parse(strategy: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, in its own types."""
    own = known(strategy)
    for name in given:
        if name not in own and (others := [other for other in STRATEGIES if name in known(other)]):
            raise UsageError(
                f"strategy {strategy} has no option {shown(name)}: it is {' and '.join(others)}'s"
            )
    parsed = registry.parse(f"strategy {strategy}", _builder(strategy), given)
    every = parsed.get("every")
    if isinstance(every, str) and re.fullmatch("-?[0-9]{1,18}", every):  # a number of steps, or a word
        parsed["every"] = int(every)
    return parsed


def build(strategy: str, given: Mapping[str, Any]) -> Options:
    """All options of a strategy, or the sentence that says what is wrong with one."""
    made: Options = _builder(strategy)(**parse(strategy, given))
    return made


def known(strategy: str) -> dict[str, registry.Option]:
    """The options of a strategy by name."""
    return registry.options(_builder(strategy))


def _builder(strategy: str) -> registry.Builder:
    if strategy not in STRATEGIES:
        raise unknown("strategy", strategy, STRATEGIES)
    builder: registry.Builder = registry.load(STRATEGIES[strategy].options)
    return builder


def _must(strategy: str, name: str, holds: bool, wanted: str, value: Any) -> None:
    if not holds:
        got = value if isinstance(value, str) and len(value) <= 80 else shown(value)
        raise UsageError(f"strategy {strategy}: {name} must be {wanted}, got {got}")
