"""The options of each strategy: one frozen model each, with every option written once.

The command line makes its flags from these models, `manyhands list` its descriptions, and reports leave out
what is at its default. So they lie here, below both towers, and import no torch.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any, ClassVar, Literal, NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from manyhands.core import formatting
from manyhands.core.errors import UsageError, shown

Outer = Literal["mean", "nesterov", "elastic"]
Schedule = Literal["gpipe", "1f1b"]


class StrategyOptions(BaseModel):
    """No options: what a strategy without any has, and the base of all others.

    A subclass adds a field per option, with its description, and checks them in `_check`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    strategy: ClassVar[str] = ""  # the name that messages begin with

    @classmethod
    def normalize(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Options that have the right types, each in the one form in which a spec holds it."""
        return given

    @model_validator(mode="after")
    def _checked(self) -> Self:
        self._check()
        return self

    def _check(self) -> None:
        """Raise a `UsageError` that names the option that is wrong, or those that do not fit together."""

    def check_workers(self, workers: int) -> None:
        """Raise a `UsageError` if the options cannot be used with this number of workers."""

    def check_exact(self, workers: int) -> None:
        """Raise a `UsageError` if these options make other steps than one worker with the same batch."""

    def _must(self, name: str, holds: bool, wanted: str, value: Any = None) -> None:
        value = getattr(self, name) if value is None else value
        if not holds:
            got = value if isinstance(value, str) and len(value) <= 80 else shown(value)
            raise UsageError(f"strategy {self.strategy}: {name} must be {wanted}, got {got}")

    def _refuse(self, reason: str) -> NoReturn:
        raise UsageError(f"strategy {self.strategy}: {reason}")


class AverageOptions(StrategyOptions):
    """Local SGD: how often the workers' models are averaged, and how."""

    strategy: ClassVar[str] = "average"

    every: int | str = Field(default=16, description="Steps between two averages, or 'epoch', or 'end'.")
    post_local: bool = Field(
        default=False,
        description="Average after every step until the learning rate first decays (post-local SGD).",
    )
    outer: Outer = Field(
        default="mean",
        description="How the average is applied: mean, nesterov (DiLoCo) or elastic (EASGD).",
    )
    outer_lr: float = Field(
        default=0.7, description="Learning rate of the outer optimizer, with outer nesterov."
    )
    outer_momentum: float = Field(
        default=0.9, description="Momentum of the outer optimizer, with outer nesterov."
    )
    elasticity: float | None = Field(
        default=None,
        description="How far each worker and the center move towards each other, with outer elastic. "
        "Defaults to 0.9 / workers.",
    )
    average_optimizer: bool | None = Field(
        default=None,
        description="Average the optimizer state (momentum, Adam's moments) together with the model. "
        "Defaults to true with outer mean, to false with nesterov.",
    )

    @property
    def averages_optimizer(self) -> bool:
        """Whether the optimizer state is averaged too; otherwise each worker keeps its own."""
        return self.outer == "mean" if self.average_optimizer is None else self.average_optimizer

    @classmethod
    def normalize(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The same with a number of steps as a number, also where it came as text."""
        every = given.get("every")
        if isinstance(every, str) and re.fullmatch("-?[0-9]{1,18}", every):
            return {**given, "every": int(every)}
        return given

    def _check(self) -> None:
        steps = isinstance(self.every, int) and self.every >= 1
        wanted = "a whole number of steps, at least 1, or epoch, or end"
        self._must("every", steps or self.every in ("epoch", "end"), wanted)
        self._must("outer_lr", self.outer_lr > 0, "above 0")
        self._must("outer_momentum", 0 <= self.outer_momentum < 1, "at least 0 and below 1")
        if self.elasticity is not None:
            self._must("elasticity", 0 < self.elasticity <= 1, "above 0 and at most 1")
            if self.outer != "elastic":
                self._refuse(f"elasticity is for outer elastic, and outer is {self.outer}")
        if self.average_optimizer and self.outer == "elastic":
            self._refuse(
                "average_optimizer does not go with outer elastic, where each worker keeps its own optimizer "
                "state: use outer mean or nesterov"
            )
        if self.every == "end" and self.outer != "mean":
            self._refuse(
                f"outer {self.outer} acts when workers meet during the run, and with every end they do not: "
                "set every to a number of steps, or use outer mean"
            )

    def check_workers(self, workers: int) -> None:
        """The workers together must not move the center further than they are away from it."""
        if self.elasticity is not None and self.elasticity * workers > 1:
            self._refuse(
                f"elasticity {self.elasticity:g} of {workers} workers moves their center further than they "
                f"are away from it: at most {1 / workers:.3g}"
            )

    def check_exact(self, workers: int) -> None:
        """Workers must continue with their mean after every step."""
        if self.outer != "mean":
            raise UsageError(
                f"average with outer {self.outer} is not single: workers do not continue with their mean; "
                "verify it with --set strategy.outer=mean --set strategy.every=1"
            )
        if self.every != 1 and workers > 1:
            raise UsageError(
                f"average with every {self.every} is not single: models differ between averages; verify it "
                "with --set strategy.every=1"
            )


class ServerOptions(StrategyOptions):
    """Parameter server: how many ranks serve, how often workers push and pull, which staleness is allowed."""

    strategy: ClassVar[str] = "server"

    servers: int = Field(default=1, description="Ranks that hold the parameters and do not train.")
    push_every: int = Field(default=1, description="Steps between two pushes of gradients to the servers.")
    pull_every: int = Field(default=1, description="Steps between two pulls of parameters from the servers.")
    staleness_aware: bool = Field(
        default=False, description="Divide the learning rate of each gradient by its staleness."
    )
    bound: int | None = Field(
        default=None,
        description="Steps that a worker may be ahead of the slowest one (stale synchronous parallel). "
        "Unlimited by default.",
    )
    backup: int | None = Field(
        default=None,
        description="Train in synchronous rounds, and do not wait for this number of the slowest workers "
        "(backup workers). Asynchronous by default.",
    )

    def _check(self) -> None:
        for name in ("servers", "push_every", "pull_every"):
            self._must(name, getattr(self, name) >= 1, "at least 1")
        self._must("bound", self.bound is None or self.bound >= 0, "0 or more steps")
        self._must("backup", self.backup is None or self.backup >= 0, "0 or more workers")
        if self.backup is None:
            return
        for name, given in (
            ("bound", self.bound is not None),
            ("push_every", self.push_every > 1),
            ("pull_every", self.pull_every > 1),
            ("staleness_aware", self.staleness_aware),
            ("more than one server", self.servers > 1),
        ):
            if given:
                self._refuse(f"{name} does not go with the synchronous rounds of backup")

    def check_workers(self, workers: int) -> None:
        """A round must wait for one worker at least."""
        if self.backup is not None and self.backup >= workers:
            self._refuse(f"backup {self.backup} of {workers} workers leaves none to wait for")


CUT = "Blocks at which the second and later stages begin, such as 2,5. Balanced by measurement by default."


class LayersOptions(StrategyOptions):
    """Consecutive layers on successive workers, one batch at a time: all but one of them wait."""

    strategy: ClassVar[str] = "layers"
    stages: ClassVar[int | None] = None
    micro_batches: ClassVar[int | None] = 1
    schedule: ClassVar[Schedule] = "gpipe"
    recompute: ClassVar[bool] = False

    cut: tuple[int, ...] = Field(default=(), description=CUT)

    def _check(self) -> None:
        self._must("cut", *_ascends(self.cut))

    def check_workers(self, workers: int) -> None:
        """There is one stage per worker."""
        _check_cut(self.cut, workers)


class PipelineOptions(StrategyOptions):
    """Pipeline parallelism: where the model is divided, and in which order micro-batches go through it."""

    strategy: ClassVar[str] = "pipeline"

    stages: int | None = Field(
        default=None,
        description="Parts of the model, one worker each. Defaults to the number of workers; with fewer "
        "stages, several replicas of the pipeline share the batch.",
    )
    micro_batches: int | None = Field(
        default=None,
        description="Parts of each replica's share of the batch. Measured before the run by default.",
    )
    schedule: Schedule = Field(
        default="1f1b",
        description="Order of micro-batches: gpipe, or 1f1b, which keeps fewer of them in memory.",
    )
    recompute: bool = Field(
        default=False,
        description="Keep only the inputs of each stage and compute its activations again for the backward "
        "pass.",
    )
    cut: tuple[int, ...] = Field(default=(), description=CUT)

    def _check(self) -> None:
        self._must("stages", self.stages is None or self.stages >= 1, "at least 1")
        self._must("micro_batches", self.micro_batches is None or self.micro_batches >= 1, "at least 1")
        self._must("cut", *_ascends(self.cut))

    def check_workers(self, workers: int) -> None:
        """The workers make one pipeline or several, each of all stages."""
        stages = self.stages or workers
        if workers % stages:
            raise UsageError(
                f"{workers} workers cannot be divided into pipelines of {stages} stages: use {stages}, "
                f"{2 * stages}, {3 * stages}, ... workers"
            )
        _check_cut(self.cut, stages)
        if self.recompute and stages == 1:
            raise UsageError(
                "--recompute keeps only the inputs of each stage, but here the model is in one piece: "
                "--offload auto recomputes where it pays"
            )


def _check_cut(cut: tuple[int, ...], stages: int) -> None:
    if cut and len(cut) != stages - 1:
        made = formatting.plural(len(cut) + 1, "stage")
        raise UsageError(f"a cut at {', '.join(map(str, cut))} makes {made}, but there are {stages}")


def _ascends(cut: tuple[int, ...]) -> tuple[bool, str, str]:
    """Whether block numbers can be the borders of stages, what they must be, and what they are."""
    wanted = "block numbers in ascending order, the first at least 1"
    return all(a < b for a, b in pairwise((0, *cut))), wanted, ", ".join(map(str, cut))


def is_default(model: type[StrategyOptions], name: str, value: Any) -> bool:
    """Whether an option has the value that it has when it is not given; JSON has lists for tuples."""
    if name not in model.model_fields:
        return False
    default = model.model_fields[name].default
    return bool(value == default or (isinstance(value, list) and tuple(value) == default))
