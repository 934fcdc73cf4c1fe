"""Checks every tensor of a checkpoint against the model and the optimizer, before either is changed.

    model/<tensor>                         optimizer/<what>/<parameter>                random/<generator>
    workers/<rank>/model/<tensor>          workers/<rank>/optimizer/<what>/<parameter>      a worker's copy
    rank/<rank>/optimizer/<what>/<parameter>                                  a worker's own optimizer state
    average/<what>                         average/<what>/<tensor>                     state of local SGD

Names are compared as the user's model has them: torch.compile puts `_orig_mod.` into them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from manyhands.engine.checkpoint.storage import MismatchError
from manyhands.recipes.own_recipe import AnyRecipe
from manyhands.recipes.state_layout import Kept, state_layout
from manyhands.strategies.state import as_tensor

_RANK = "(?:0|[1-9][0-9]{0,5})"
_HELD = re.compile(
    rf"(?P<holder>(?:workers|rank)/(?P<rank>{_RANK})/)?"
    r"(?:model/(?P<tensor>.+)|optimizer/(?P<what>[a-z_]{1,40})/(?P<parameter>.+))",
    re.DOTALL,
)
_LOCAL_SGD = re.compile(r"average/(?P<what>[a-z_]{1,40})(?:/(?P<tensor>.+))?", re.DOTALL)
_PER_RANK = ("used", "losses")  # of local SGD: one number per rank ...
_WEIGHTS = ("used_weights", "loss_weights")  # ... and, if its loss has weights
_STEP_TYPES = (torch.float32, torch.float64)  # in which optimizers count steps
_COMPILED = "_orig_mod."


class TensorSpec(NamedTuple):
    """What a tensor of the model must look like."""

    name: str  # in the model at hand
    shape: torch.Size
    dtype: torch.dtype
    finite: bool  # a mask may hold infinity if it was built so


def plain(name: str) -> str:
    """A name without the prefix of torch.compile."""
    return name.replace(_COMPILED, "")


def plainly_named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under plain names, unless two would get the same name."""
    found = {plain(name): tensor for name, tensor in tensors.items()}
    return found if len(found) == len(tensors) else dict(tensors)


@final
class Checking:
    """Checks a checkpoint against a new model; tensors of type `converts` may be converted to its type."""

    def __init__(
        self, model: nn.Module, recipe: AnyRecipe, ranks: int, converts: torch.dtype | None = None
    ) -> None:
        tensors = model.state_dict(keep_vars=True)
        self._named = plain if len({plain(name) for name in tensors}) == len(tensors) else str
        self._wanted = {self._named(name): _wanted(name, tensor) for name, tensor in tensors.items()}
        everything = model.named_parameters(remove_duplicate=False)
        self._parameters = {self._named(name) for name, _ in everything}
        self._ranks, self._converts = ranks, converts
        layout = state_layout(recipe, model)
        self._kept = {self._named(name): kept for name, kept in layout.items()}
        # momentum may have been switched off since
        self._optional = {"momentum_buffer"} if recipe.optimizer == "sgd" else set()
        self.converted = False

    def check(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors under the names of the model at hand; random generators are not checked here."""
        found: dict[str, Tensor] = {}
        held: dict[str, set[str]] = defaultdict(set)  # the model's tensors, by holder
        states: dict[tuple[str, str], set[str]] = defaultdict(set)  # kinds of state, by holder and parameter
        order = {f"model/{name}": number for number, name in enumerate(self._wanted)}
        # the model's tensors first, in its order: they show best what is wrong
        for name in sorted(tensors, key=lambda name: (order.get(self._named(name), len(order)), name)):
            tensor = tensors[name]
            if name.startswith("random/"):
                found[name] = tensor
            elif parts := _HELD.fullmatch(name):
                holder, what = self._holder(name, parts), parts["what"]
                own = self._named(parts["tensor"] or parts["parameter"])
                if what is None:
                    held[holder].add(own)
                    fitting = self._fit(name, tensor, own)
                    found[f"{holder}model/{self._wanted[own].name}"] = fitting
                else:
                    states[holder, own].add(what)
                    fitting = self._optimizer_state(name, tensor, own, what)
                    found[f"{holder}optimizer/{what}/{self._wanted[own].name}"] = fitting
            elif parts := _LOCAL_SGD.fullmatch(name):
                found |= self._local_sgd_state(name, tensor, parts["what"], parts["tensor"])
            else:
                raise MismatchError(f"the checkpoint holds {_short(name)}, which no run writes")
        self._complete(held, states)
        _check_local_sgd(found, self._ranks)
        return found

    def _holder(self, name: str, parts: re.Match[str]) -> str:
        """The holder of a tensor: empty for all workers, or one rank."""
        holder = parts["holder"] or ""
        if holder and int(parts["rank"]) >= self._ranks:
            raise MismatchError(f"the checkpoint is of {self._ranks} workers, but holds {_short(name)}")
        if holder.startswith("rank/") and parts["what"] is None:
            raise MismatchError(f"the checkpoint holds {_short(name)}, which no run writes")
        return holder

    def _fit(
        self, name: str, tensor: Tensor, own: str, *, finite: bool = False, shape: torch.Size | None = None
    ) -> Tensor:
        """Check shape, type and, except for masks, finiteness of a tensor of the model, or kept for it."""
        if own not in self._wanted:
            raise _another(f"{_short(name)} is in only one of them")
        wanted = self._wanted[own]
        shape = wanted.shape if shape is None else shape
        if tensor.shape != shape:
            raise _another(f"{_short(name)} is {tuple(tensor.shape)} instead of {tuple(shape)}")
        if tensor.dtype != wanted.dtype:
            if tensor.dtype != self._converts or not wanted.dtype.is_floating_point:
                raise _another(f"{_short(name)} is {_kind(tensor.dtype)} instead of {_kind(wanted.dtype)}")
            tensor, self.converted = tensor.to(wanted.dtype), True
        if (finite or wanted.finite) and not _is_finite(tensor):
            raise MismatchError(f"the checkpoint holds numbers that are not finite in {_short(name)}")
        return tensor

    def _optimizer_state(self, name: str, tensor: Tensor, own: str, what: str) -> Tensor:
        """Check the optimizer state of a parameter: a tensor of its shape, or a count of steps."""
        kept = self._kept.get(own, Kept({}, {}))
        if own in self._parameters and what in kept.scalars:
            return self._scalar(name, tensor, what, kept.scalars[what])
        if own not in self._parameters or (what not in kept.tensors and what not in self._optional):
            raise _another(f"{_short(name)} is in only one of them")
        shape = kept.tensors[what].shape if what in kept.tensors else None
        return self._fit(name, tensor, own, finite=True, shape=shape)

    def _scalar(self, name: str, tensor: Tensor, what: str, first: Tensor | float) -> Tensor:
        """Check what an optimizer keeps once per parameter: a count of steps, or another number."""
        if what == "step":
            if tensor.shape != () or tensor.dtype not in _STEP_TYPES or not 0 <= float(tensor) <= 2**53:
                raise _another(f"{_short(name)} is not a count of steps")
            return tensor
        wanted = as_tensor(first)
        if tensor.shape != () or tensor.dtype != wanted.dtype or not _is_finite(tensor):
            raise _another(f"{_short(name)} is not a number of type {_kind(wanted.dtype)}")
        return tensor

    def _local_sgd_state(self, name: str, tensor: Tensor, what: str, of: str | None) -> dict[str, Tensor]:
        """Check the state of local SGD: a tensor like one of the model's, or a few numbers."""
        if of is not None:
            own = self._named(of)
            fitting = self._fit(name, tensor, own)
            return {f"average/{what}/{self._wanted[own].name}": fitting}
        right = tensor.dtype in (torch.int64, torch.float64) and tensor.dim() == (
            what in _PER_RANK + _WEIGHTS
        )
        if not right or (what != "losses" and not bool((tensor >= 0).all() and _is_finite(tensor))):
            raise MismatchError(f"the checkpoint's {_short(name)} is not a state of local SGD")
        return {name: tensor}

    def _complete(
        self, held: Mapping[str, Collection[str]], states: Mapping[tuple[str, str], set[str]]
    ) -> None:
        """Check that each holder has the whole model, and all or no optimizer state of a parameter."""
        holders = {"", *(holder for holder, _ in states if not holder.startswith("rank/")), *held}
        for holder in sorted(holders):
            if missing := sorted(self._wanted.keys() - set(held.get(holder, ()))):
                raise _another(f"{holder}model/{missing[0]} is in only one of them")
        for (holder, own), kinds in states.items():
            kept = self._kept.get(own, Kept({}, {}))
            if missing := sorted({*kept.tensors, *kept.scalars} - kinds):
                raise _another(f"{holder}optimizer/{missing[0]}/{own} is in only one of them")


def without_optimizer(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without optimizer state."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = _HELD.fullmatch(name)
        if parts is None or parts["what"] is None:
            found[name] = tensor
    return found


def _wanted(name: str, tensor: Tensor) -> TensorSpec:
    """What a tensor must look like: trained parameters must be finite, others if they were built so."""
    built = tensor.detach()
    trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
    # of a sharded frozen tensor this rank sees only a part
    return TensorSpec(
        name, built.shape, built.dtype, trained or (type(built) is Tensor and _is_finite(built))
    )


def _check_local_sgd(tensors: Mapping[str, Tensor], ranks: int) -> None:
    """Check that the state of local SGD is complete."""
    if "average/used" not in tensors:
        return
    weighted = any(f"average/{what}" in tensors for what in _WEIGHTS)
    for name in ("average/outer", *(f"average/{what}" for what in _PER_RANK + _WEIGHTS * weighted)):
        if name not in tensors or (tensors[name].dim() and len(tensors[name]) != ranks):
            raise MismatchError(f"the checkpoint's {name} is not a state of local SGD with {ranks} workers")


def _is_finite(tensor: Tensor) -> bool:
    numbers = tensor.is_floating_point() or tensor.is_complex()
    return not numbers or all(bool(torch.isfinite(part).all()) for part in _parts(tensor))


def _parts(tensor: Tensor) -> Iterable[Tensor]:
    """A large tensor in parts, so that checking it takes little memory."""
    if tensor.element_size() == 1:  # float8, for which torch has no isfinite
        tensor = tensor.float()
    return torch.split(tensor.reshape(-1), 1 << 20)


def _another(how: str) -> MismatchError:
    return MismatchError(f"the checkpoint is of another model: {how}")


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _short(name: str) -> str:
    """A name of limited length, in printable characters."""
    shown = name if name.isprintable() else ascii(name)
    return shown if len(shown) <= 100 else f"{shown[:100]}..."
