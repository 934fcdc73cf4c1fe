"""A recipe that is the user's own function: from named parameters and a batch size to an optimizer.

    def mine(named_parameters, batch, decay=0.01):
        return torch.optim.NAdam([p for _, p in named_parameters], lr=0.002 * batch / 256, weight_decay=decay)

It is called with the whole parameters of the model, whatever a strategy then gives the optimizer: all of
them, some of them, or slices. The learning rate is that of the first group and stays constant, unless there
is a schedule; the other groups keep their ratios to it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.core.errors import UsageError, choices, kind_of, shown
from manyhands.recipes.base import Recipe, Scope
from manyhands.recipes.lr_schedule import Constant, LearningRate, OwnSchedule
from manyhands.recipes.optimizer_trials import Scalars, find_traits, keep
from manyhands.recipes.several import Several
from manyhands.records.user_names import short_name

Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class OwnRecipe:
    """What `Recipe` is for plain values. What follows from a model is known once it is `bound` to one."""

    name: str
    function: Function
    options: Mapping[str, Any] = field(default_factory=dict)
    clip: float | None = None  # limits the norm of the whole gradient; the strategy applies it
    own_schedule: OwnSchedule | None = None
    batch: int = 0  # samples per update
    lr: float = 0.0
    optimizer: str = ""  # the name of its class
    scope: Scope = "model"
    scalars: Scalars = field(default_factory=dict)
    left_out: tuple[str, ...] = ()  # parameters that the optimizer does not get
    momentum = 0.0  # of no strategy's concern: what the function says is used

    def bound(self, parameters: Mapping[str, nn.Parameter], batch: int) -> OwnRecipe:
        """The recipe for these parameters and this many samples per update."""
        asked = replace(self, batch=batch)
        optimizer = asked._made(parameters)
        name = f"the optimizer of {self.name}, {_kind(optimizer)},"
        traits = find_traits(optimizer, name)
        held = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        return replace(
            asked,
            lr=_lr(optimizer, name),
            optimizer=_kind(optimizer),
            scope=self._declared or traits.scope,
            scalars=traits.scalars,
            left_out=tuple(n for n, parameter in parameters.items() if id(parameter) not in held),
        )

    def build(self, pieces: Mapping[str, Tensor], whole: Mapping[str, nn.Parameter]) -> Optimizer:
        """The optimizer for what a worker has of the parameters: all of them, some, or slices."""
        optimizer = self._made(whole)
        names = {id(parameter): name for name, parameter in whole.items()}
        for group in optimizer.param_groups:
            own = [names[id(parameter)] for parameter in group["params"]]
            group["names"] = [name for name in own if name in pieces]
            group["scalars"] = dict(self.scalars)
            group["lr_ratio"] = float(group["lr"]) / self.lr if "lr" in group else 1.0
            for name in group["names"]:
                if (held := optimizer.state.pop(whole[name], None)) is not None:
                    optimizer.state[pieces[name]] = held
            group["params"] = [pieces[name] for name in group["names"]]
        keep(optimizer, pieces.values())
        return optimizer

    def schedule(self, batch: int, epoch: int, horizon: int) -> LearningRate:
        """The learning rate over a run: the user's schedule, or that of the optimizer."""
        return self.own_schedule or Constant(self.lr)

    def describe(self, batch: int, epoch: int, horizon: int | None = None, where: str = "") -> str:
        """One line of text: `NAdam of mine · lr 0.002, constant · clip 1`."""
        rate = self.own_schedule.describe() if self.own_schedule else f"lr {self.lr:.4g}, constant"
        parts = [f"{self.optimizer} of {short_name(self.name)}", rate]
        parts += [f"{name} {value}" for name, value in self.options.items()]
        return " · ".join([*parts, *([] if self.clip is None else [f"clip {self.clip:.4g}"])])

    def to_dict(self) -> dict[str, Any]:
        """What can be recorded of it, ready for JSON."""
        schedule = {"schedule": self.own_schedule.name} if self.own_schedule else {}
        return {
            "name": self.name,
            "optimizer": self.optimizer,
            "lr": self.lr,
            **schedule,
            **({} if self.clip is None else {"clip": self.clip}),
            "options": dict(self.options),
        }

    @property
    def saved_as(self) -> str:
        """The optimizer's name in a checkpoint."""
        return f"own: {self.optimizer}"

    @property
    def _declared(self) -> Scope | None:
        """What the function says of its optimizer: `mine.scope = "parameters"`."""
        found: Scope | None = getattr(self.function, "scope", None)
        if found is not None and found not in get_args(Scope):
            known = choices(str(found), get_args(Scope))
            raise UsageError(f"the scope of {self.name} is {shown(found)}, which is not one ({known})")
        return found

    def _made(self, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
        """Call the function, and check what it returns."""
        try:
            made = self.function(list(parameters.items()), self.batch, **self.options)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"the recipe {self.name} fails: {type(error).__name__}: {str(error).strip():.200}"
            ) from error
        optimizers = list(made) if isinstance(made, list | tuple) and made else [made]
        if not all(isinstance(each, Optimizer) for each in optimizers):
            odd = next(each for each in optimizers if not isinstance(each, Optimizer))
            instead = (
                "; a schedule is a function of samples: lr_schedule=... or --lr-schedule"
                if hasattr(odd, "get_last_lr")
                else ""
            )
            raise UsageError(
                f"the recipe {self.name} must return a torch.optim.Optimizer, or a list of them, but returns "
                f"{kind_of(odd)}{instead}"
            )
        optimizer = optimizers[0] if len(optimizers) == 1 else Several(optimizers)
        self._check(optimizer, parameters)
        return optimizer

    def _check(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        known = {id(parameter) for parameter in parameters.values()}
        held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        strange = [tensor for tensor in held if id(tensor) not in known]
        if strange:
            raise UsageError(
                f"the optimizer of {self.name} has a tensor of shape {tuple(strange[0].shape)} that is not "
                "among the parameters it was called with: use those"
            )
        if not held:
            raise UsageError(f"the optimizer of {self.name} has no parameter to train")


AnyRecipe = Recipe | OwnRecipe


def check_function(name: str, function: Function) -> None:
    """Refuse what cannot be called as a recipe: it needs two arguments, and defaults for all others."""
    if not callable(function):
        raise UsageError(
            f"the recipe {name} is {kind_of(function)}, not a function (named_parameters, batch) "
            "that returns a torch.optim.Optimizer"
        )
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a callable without a signature
        return
    required = [each for each in parameters if each.default is each.empty and each.kind in _POSITIONAL]
    accepts = sum(each.kind in _POSITIONAL for each in parameters)
    several = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    keywords = [each for each in parameters if each.default is each.empty and each.kind is each.KEYWORD_ONLY]
    if len(required) > 2 or keywords or (accepts < 2 and not several):
        takes = ", ".join(each.name for each in parameters) or "nothing"
        raise UsageError(
            f"the recipe {name} must take (named_parameters, batch), and everything else with a default, but "
            f"takes ({takes})"
        )


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _kind(optimizer: Optimizer) -> str:
    if isinstance(optimizer, Several):
        return " + ".join(type(each).__name__ for each in optimizer.optimizers)
    return type(optimizer).__name__


def _lr(optimizer: Optimizer, name: str) -> float:
    """The learning rate of the first group; 1 if it has none."""
    found = float(optimizer.param_groups[0].get("lr", 1.0))
    if not (found > 0 and math.isfinite(found)):
        raise UsageError(f"{name} has a learning rate of {found:g} in its first group: it must be above 0")
    return found
