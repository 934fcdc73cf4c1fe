"""Find out by trial what an optimizer needs to see at a time, and what it keeps for each parameter.

Strategies divide an update among workers. SGD and Adam treat every element by itself, so that a worker may
update any slice. Muon and Adafactor need whole parameters. Some optimizers look at the whole model. Of a
user's optimizer nobody knows; so copies of it make a few steps on small tensors, whole, sliced and apart, and
the results are compared:

    elements     a slice of a parameter gets the update that it gets as a part of the whole
    parameters   a parameter gets the update that it gets beside the others
    model        neither
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.core.errors import UsageError, kind_of
from manyhands.recipes.base import Scope

Scalars = Mapping[str, str]
"""What an optimizer keeps once per parameter, whatever its shape: by name, "tensor" or a type of Python."""

STEPS = 3
SMALL = 3  # elements along each dimension of a small tensor
LIKE = 2  # parameters of one group and number of dimensions that are tried
TOLERANCE = 1e-11


class Traits(NamedTuple):
    """What was found out about an optimizer."""

    scope: Scope
    scalars: Scalars


def find_traits(optimizer: Optimizer, name: str) -> Traits:
    """Try the optimizer, which stays as it is, or raise a UsageError that says why it cannot be used."""
    chosen = _chosen(optimizer)
    values = _values(chosen)
    try:
        whole = _Trial(optimizer, chosen, values)
    except Exception as error:
        raise UsageError(
            f"{name} cannot make a step with gradients alone, as manyhands asks it to: {_first_line(error)}"
        ) from error
    _check_groups(optimizer, whole.optimizer, name)
    scalars = _scalars(whole, name)
    return Traits(_scope(optimizer, chosen, values, whole), scalars)


def copy_with(optimizer: Optimizer, replaced: Mapping[Tensor, Tensor]) -> Optimizer:
    """A copy of an optimizer that has these tensors as its only parameters, in place of its own.

    Optimizers inside it are copied too. State that it has from the start gets the shapes of the new tensors.
    """
    memo: dict[int, Any] = {
        id(parameter): replaced.get(parameter, parameter)  # the others are not copied
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    made = _copied(optimizer, replaced, memo)
    keep(made, replaced.values())
    return made


def _copied(optimizer: Optimizer, replaced: Mapping[Tensor, Tensor], memo: dict[int, Any]) -> Optimizer:
    # not copy.deepcopy: optimizers pickle without the attributes that a class of its own has added
    made: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = made
    if id(optimizer.state) not in memo:  # optimizers may share one
        held = {old: optimizer.state[old] for old in replaced if old in optimizer.state}
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        memo[id(optimizer.state)] = state
        state.update({replaced[old]: copy.deepcopy(values, memo) for old, values in held.items()})
    for inner in _optimizers_in(vars(optimizer).values()):
        if id(inner) not in memo:
            _copied(inner, replaced, memo)
    made.__dict__.update(copy.deepcopy(vars(optimizer), memo))
    return made


def _optimizers_in(values: Iterable[Any]) -> list[Optimizer]:
    found: list[Optimizer] = []
    for value in values:
        if isinstance(value, Optimizer):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [each for each in value if isinstance(each, Optimizer)]
    return found


def _chosen(optimizer: Optimizer) -> list[Tensor]:
    """A few parameters of each group and number of dimensions: others are treated alike."""
    found: dict[tuple[int, int], list[Tensor]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            found.setdefault((number, parameter.ndim), []).append(parameter)
    return [parameter for alike in found.values() for parameter in alike[:LIKE]]


def _values(chosen: list[Tensor]) -> list[list[Tensor]]:
    """Values and gradients of small tensors with as many dimensions, which are the same in each trial."""
    generator = torch.Generator().manual_seed(0)

    def drawn(parameter: Tensor) -> Tensor:
        shape = [min(SMALL, max(1, size)) for size in parameter.shape]
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    return [[drawn(parameter) for _ in range(STEPS + 1)] for parameter in chosen]


class _Trial:
    """A few steps of a copy; `part` takes of each small tensor what the copy gets."""

    def __init__(
        self,
        optimizer: Optimizer,
        chosen: list[Tensor],
        values: list[list[Tensor]],
        part: Callable[[int, Tensor], Tensor | None] = lambda number, tensor: tensor,
    ) -> None:
        held: dict[Tensor, Tensor] = {}
        gradients: list[list[Tensor]] = []
        self.found: dict[int, Tensor] = {}
        for number, (parameter, (first, *others)) in enumerate(zip(chosen, values, strict=True)):
            piece = part(number, first)
            if piece is not None:
                made = torch.nn.Parameter(piece.clone())
                self.found[number] = held[parameter] = made
                gradients.append([g for each in others if (g := part(number, each)) is not None])
        self.optimizer = copy_with(optimizer, held)
        for step in range(STEPS):
            for tensor, each in zip(held.values(), gradients, strict=True):
                tensor.grad = each[step].clone()
            self.optimizer.step()


def keep(optimizer: Optimizer, tensors: Iterable[Tensor]) -> None:
    """Drop all parameters but these from an optimizer; state that it has from the start fits their shapes."""
    kept = {id(tensor) for tensor in tensors}
    for group in optimizer.param_groups:
        group["params"] = [tensor for tensor in group["params"] if id(tensor) in kept]
    for tensor in list(optimizer.state):
        if id(tensor) not in kept:
            del optimizer.state[tensor]
            continue
        held = optimizer.state[tensor]
        for kind, value in held.items():
            if isinstance(value, Tensor) and value.ndim and value.shape != tensor.shape:
                held[kind] = _constant(kind, value, tensor)


def _constant(kind: str, value: Tensor, like: Tensor) -> Tensor:
    """State that an optimizer has before its first step, for another shape: the same number everywhere."""
    first = value.flatten()[0]
    if not bool((value == first).all()):
        raise UsageError(f"the optimizer has a {kind} of different numbers before its first step")
    return torch.full_like(like, float(first), requires_grad=False)


def _scope(optimizer: Optimizer, chosen: list[Tensor], values: list[list[Tensor]], whole: _Trial) -> Scope:
    def same(part: Callable[[int, Tensor], Tensor | None]) -> bool:
        try:
            other = _Trial(optimizer, chosen, values, part)
        except Exception:  # noqa: BLE001 (it does not take such tensors: that is what was asked)
            return False
        pairs = (
            (part(number, whole.found[number].detach()), tensor.detach())
            for number, tensor in other.found.items()
        )
        return all(a is not None and _equal(a, b) for a, b in pairs)

    halves = [lambda number, tensor, half=half: tensor if number % 2 == half else None for half in (0, 1)]
    if len(chosen) > 1 and not all(same(half) for half in halves):
        return "model"
    # a slice of each, then of some of them nothing: a worker may have no part of a parameter
    if same(lambda number, tensor: tensor.flatten()[1:]) and same(
        lambda number, tensor: tensor.flatten()[: 0 if number % 2 else 1]
    ):
        return "elements"
    return "parameters"


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE))


def _check_groups(before: Optimizer, after: Optimizer, name: str) -> None:
    """Refuse numbers that a step changes in a group of parameters: checkpoints hold those of parameters."""
    for old, new in zip(before.param_groups, after.param_groups, strict=True):
        changed = [key for key in new if key != "params" and not _same_option(old.get(key), new[key])]
        if changed:
            raise UsageError(
                f"{name} changes {', '.join(map(str, changed))} of its parameter groups in a step, which "
                "checkpoints do not hold: its state must be kept for each parameter, in optimizer.state"
            )


def _same_option(old: Any, new: Any) -> bool:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return torch.equal(old, new)
    return bool(old == new)


def _scalars(trial: _Trial, name: str) -> Scalars:
    """What is kept once per parameter: numbers, and tensors without a dimension of parameters that have."""
    found: dict[str, str] = {}
    for parameter, held in trial.optimizer.state.items():
        if not isinstance(parameter, Tensor):
            raise UsageError(f"{name} keeps {parameter!r:.40} in its state, which belongs to no parameter")
        for kind, value in held.items():
            if isinstance(value, Tensor):
                if value.ndim == 0 and (parameter.ndim or kind == "step"):
                    found[kind] = "tensor"
            elif isinstance(value, bool | int | float):
                found[kind] = type(value).__name__
            elif value is not None:
                raise UsageError(
                    f"{name} keeps {kind_of(value)} as {kind} of each parameter, which checkpoints "
                    "cannot hold: only tensors and numbers can be saved"
                )
    return found


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]:.150}" if text else type(error).__name__
