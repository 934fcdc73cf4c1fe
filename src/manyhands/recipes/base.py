"""A recipe: the plain values that turn a batch size into an optimizer and a schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

from manyhands.core.errors import UsageError, shown, unknown
from manyhands.recipes.lr_schedule import Decay, LearningRate, OwnSchedule, Schedule

Scope = Literal["elements", "parameters", "model"]  # what an optimizer must see at a time for its update

# those of torch.optim, and two of ours
OptimizerName = Literal[
    "sgd", "adam", "adamw", "adadelta", "adafactor", "adagrad", "adamax", "asgd", "muon", "nadam", "radam",
    "rmsprop", "rprop", "lars", "lamb",
]  # fmt: skip
Scaling = Literal["linear", "sqrt", "none"]
WarmupFrom = Literal["reference", "zero"]

LARGEST = 1e300  # products of larger numbers would overflow
WITH_MOMENTUM = ("sgd", "lars")  # optimizers that use `momentum`
WHOLE = ("adafactor", "muon")  # those that need whole parameters; the others treat each element by itself
# what they keep once per parameter, whatever its shape
SCALARS = {"step": "tensor", "mu_product": "tensor", "eta": "tensor", "mu": "tensor"}
REFERENCE_BATCH = 256  # the batch that a recipe's `lr` is for: one server of eight GPUs in Goyal et al.


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The optimizer and how its learning rate follows from the batch: plain values that can be recorded.

    `lr` is the learning rate for a batch of 256, `warmup` is in epochs, `milestones` are fractions of the
    run. `momentum` is for sgd and lars, `nesterov` for sgd, the betas for adam, adamw, adamax, nadam, radam
    and lamb, `coefficient` for lars, `clamp` for lamb. `clip` limits the norm of the whole gradient; the
    strategy applies it. What else an optimizer of torch has stays at torch's default. With `own_schedule` the
    learning rate is what a function of the user's says.
    """

    name: str
    optimizer: OptimizerName
    lr: float
    scaling: Scaling = "none"
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    warmup: float = 0.0
    warmup_from: WarmupFrom = "reference"
    decay: Decay = "none"
    milestones: tuple[float, ...] = ()
    factor: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.999
    coefficient: float = 0.001
    clamp: float | None = None
    clip: float | None = None
    own_schedule: OwnSchedule | None = None

    def __post_init__(self) -> None:
        _choice("optimizer", self.optimizer, OptimizerName)
        _choice("scaling", self.scaling, Scaling)
        _choice("warmup_from", self.warmup_from, WarmupFrom)
        _choice("decay", self.decay, Decay)
        _number("lr", self.lr, _positive, "a positive number")
        for name in ("momentum", "beta1", "beta2"):
            _number(name, getattr(self, name), lambda value: 0 <= value < 1, "at least 0 and below 1")
        _number("weight_decay", self.weight_decay, lambda value: value >= 0, "0 or a positive number")
        _number("warmup", self.warmup, lambda value: value >= 0, "0 or a positive number of epochs")
        _number("factor", self.factor, lambda value: 0 < value <= 1, "above 0 and at most 1")
        _number("coefficient", self.coefficient, _positive, "a positive number")
        if self.clamp is not None:
            _number("clamp", self.clamp, _positive, "a positive number or none")
        check_clip(self.clip)
        if self.optimizer == "sgd" and self.nesterov and self.momentum == 0:
            raise UsageError(f"nesterov needs a momentum above 0, got {shown(self.momentum)}")
        object.__setattr__(self, "milestones", _fractions(self.milestones))

    @property
    def scope(self) -> Scope:
        """What the optimizer must see at a time: see optimizer_trials.py."""
        return "parameters" if self.optimizer in WHOLE else "elements"

    @property
    def scalars(self) -> Mapping[str, str]:
        """What the optimizer keeps once per parameter."""
        return SCALARS

    @property
    def left_out(self) -> tuple[str, ...]:
        """Parameters that the optimizer does not get: none."""
        return ()

    @property
    def saved_as(self) -> str:
        """The optimizer's name in a checkpoint."""
        return self.optimizer

    def bound(self, parameters: object, batch: int) -> Recipe:
        """The recipe for a model: nothing in it depends on one."""
        return self

    def peak(self, batch: int) -> float:
        """The learning rate for this batch: where warm-up ends and decay begins."""
        if self.scaling == "linear":
            return self.lr * (batch / REFERENCE_BATCH)
        if self.scaling == "sqrt":
            return self.lr * math.sqrt(batch / REFERENCE_BATCH)
        return self.lr

    def schedule(self, batch: int, epoch: int, horizon: int) -> LearningRate:
        """The learning rate over a run of `horizon` samples whose epochs have `epoch` samples.

        A warm-up longer than the run is shortened to the run. If the peak is not above the start, there is
        no warm-up.
        """
        return self.own_schedule or Schedule(
            start=self._start,
            peak=self.peak(batch),
            warmup=round(min(self.warmup * epoch, horizon)) if self._warms_up(batch) else 0,
            horizon=horizon,
            decay=self.decay,
            # rounded to samples: 8/9 of 90 epochs is exactly the end of epoch 80
            milestones=tuple(round(fraction * horizon) for fraction in self.milestones),
            factor=self.factor,
        )

    def describe(self, batch: int, epoch: int, horizon: int | None = None, where: str = "") -> str:
        """One line of text: `sgd · lr 0.4 per 256 samples = 0.1 at batch 64, cosine decay · momentum 0.9`.

        With `horizon`, the warm-up is at most as long as the run. `where` replaces `at batch 64`, for updates
        that use only a part of the batch.
        """
        lr = ", ".join(
            [self._scaled(batch, where or f"at batch {batch:,}"), *self._course(batch, epoch, horizon)]
        )
        if self.own_schedule is not None:
            lr = self.own_schedule.describe()
        return " · ".join([self.optimizer, lr, *self._extras()])

    def to_dict(self) -> dict[str, Any]:
        """Every field, ready for JSON."""
        found = {name: value for name, value in vars(self).items() if name != "own_schedule"}
        named = {"schedule": self.own_schedule.name} if self.own_schedule is not None else {}
        return {**found, "milestones": list(self.milestones), **named}

    @property
    def _start(self) -> float:
        return self.lr if self.warmup_from == "reference" else 0.0

    def _warms_up(self, batch: int) -> bool:
        return self.warmup > 0 and self.peak(batch) > self._start

    def _scaled(self, batch: int, where: str) -> str:
        if self.scaling == "none":
            return f"lr {_plain(self.lr)}"
        if batch == REFERENCE_BATCH:
            return f"lr {_plain(self.lr)} {where}"
        how = " (square root)" if self.scaling == "sqrt" else ""
        return f"lr {_plain(self.lr)} per {REFERENCE_BATCH} samples = {_plain(self.peak(batch))} {where}{how}"

    def _course(self, batch: int, epoch: int, horizon: int | None) -> list[str]:
        parts = []
        if self._warms_up(batch):
            epochs = self.warmup if horizon is None else min(self.warmup, horizon / epoch)
            origin = " from 0" if self.warmup_from == "zero" else ""
            parts.append(f"warm-up {_plain(epochs)} {'epoch' if epochs == 1 else 'epochs'}{origin}")
        if self.decay != "none":
            parts.append(f"{self.decay} decay")
        return parts or ["constant"]

    def _extras(self) -> list[str]:
        parts = []
        if self.optimizer in WITH_MOMENTUM and self.momentum:
            parts.append(f"{'nesterov ' if self.nesterov else ''}momentum {_plain(self.momentum)}")
        if self.weight_decay:
            parts.append(f"weight decay {_plain(self.weight_decay)}")
        if self.clip is not None:
            parts.append(f"clip {_plain(self.clip)}")
        return parts


def check_clip(clip: Any) -> None:
    """Refuse a bound for the norm of gradients that is not one."""
    if clip is not None:
        _number("clip", clip, _positive, "a positive number or none")


def _plain(value: float) -> str:
    return f"{value:.4g}"


def _positive(value: float) -> bool:
    return value > 0


def _choice(name: str, value: object, literal: Any) -> None:
    if value not in get_args(literal):
        raise unknown(name, value, get_args(literal))


def _is_finite(value: object) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def _number(name: str, value: Any, accepts: Callable[[float], bool], wanted: str) -> None:
    if _is_finite(value) and abs(value) >= LARGEST:
        raise UsageError(f"{name} must be below {LARGEST:g}, got {shown(value)}")
    if not (_is_number(value) and accepts(value)):
        raise UsageError(f"{name} must be {wanted}, got {shown(value)}")


def _fractions(given: Any) -> tuple[float, ...]:
    fractions = tuple(given) if isinstance(given, list | tuple) else (None,)
    inside = all(_is_number(fraction) and 0 < fraction < 1 for fraction in fractions)
    if not inside or any(after <= before for before, after in pairwise(fractions)):
        raise UsageError(f"milestones must be increasing fractions between 0 and 1, got {shown(given)}")
    return fractions
