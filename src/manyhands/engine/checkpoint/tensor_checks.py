"""Every tensor of a checkpoint against the model and the optimizer it is for, before either is touched.

    model/<tensor>                         optimizer/<what>/<parameter>                random/<generator>
    workers/<rank>/model/<tensor>          workers/<rank>/optimizer/<what>/<parameter>      a worker's copy
    rank/<rank>/optimizer/<what>/<parameter>                                           a worker's own memory
    average/<note>                         average/<what>/<tensor>                     what local SGD keeps

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
from manyhands.recipes import optimizers
from manyhands.recipes.base import Recipe

_RANK = "(?:0|[1-9][0-9]{0,5})"
_HELD = re.compile(
    rf"(?P<holder>(?:workers|rank)/(?P<rank>{_RANK})/)?"
    r"(?:model/(?P<tensor>.+)|optimizer/(?P<what>[a-z_]{1,40})/(?P<parameter>.+))",
    re.DOTALL,
)
_NOTE = re.compile(r"average/(?P<what>[a-z_]{1,40})(?:/(?P<tensor>.+))?", re.DOTALL)
_OF_RANKS = ("used", "losses")  # notes that have a number for each rank
_COUNTED = (torch.float32, torch.float64)  # how optimizers count steps
_COMPILED = "_orig_mod."


class TensorSpec(NamedTuple):
    """What a tensor of the model must be like."""

    name: str  # as the model at hand has it
    shape: torch.Size
    dtype: torch.dtype
    finite: bool  # a mask may be infinite where it was built so


def plain(name: str) -> str:
    """A name without what torch.compile put into it."""
    return name.replace(_COMPILED, "")


def plainly_named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Under plain names, unless two would then have the same."""
    found = {plain(name): tensor for name, tensor in tensors.items()}
    return found if len(found) == len(tensors) else dict(tensors)


@final
class Checking:
    """What a checkpoint of a freshly built model must hold; `converts` is a type that may become another."""

    def __init__(
        self, model: nn.Module, recipe: Recipe, ranks: int, converts: torch.dtype | None = None
    ) -> None:
        tensors = model.state_dict(keep_vars=True)
        self._named = plain if len({plain(name) for name in tensors}) == len(tensors) else str
        self._wanted = {self._named(name): _wanted(name, tensor) for name, tensor in tensors.items()}
        everything = model.named_parameters(remove_duplicate=False)
        self._parameters = {self._named(name) for name, _ in everything}
        self._ranks, self._converts = ranks, converts
        self._needed = _remembered(recipe)
        # sgd's momentum may have been switched off meanwhile
        self._known = self._needed | ({"momentum_buffer"} if recipe.optimizer == "sgd" else set())
        self.converted = False

    def check(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors under the names of the model at hand; generators are for others to check."""
        found: dict[str, Tensor] = {}
        held: dict[str, set[str]] = defaultdict(set)  # the model's tensors, by whose they are
        remembered: dict[tuple[str, str], set[str]] = defaultdict(set)  # kinds, by whose and of which
        order = {f"model/{name}": number for number, name in enumerate(self._wanted)}
        # the model's own first, as it has them: they tell best what is wrong
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
                    remembered[holder, own].add(what)
                    fitting = self._memory(name, tensor, own, what)
                    found[f"{holder}optimizer/{what}/{self._wanted[own].name}"] = fitting
            elif parts := _NOTE.fullmatch(name):
                found |= self._note(name, tensor, parts["what"], parts["tensor"])
            else:
                raise MismatchError(f"the checkpoint holds {_short(name)}, which no run writes")
        self._complete(held, remembered)
        _check_notes(found, self._ranks)
        return found

    def _holder(self, name: str, parts: re.Match[str]) -> str:
        """Whose tensor it is: everybody's, or one rank's of those that wrote it."""
        holder = parts["holder"] or ""
        if holder and int(parts["rank"]) >= self._ranks:
            raise MismatchError(f"the checkpoint is of {self._ranks} workers, but holds {_short(name)}")
        if holder.startswith("rank/") and parts["what"] is None:
            raise MismatchError(f"the checkpoint holds {_short(name)}, which no run writes")
        return holder

    def _fit(self, name: str, tensor: Tensor, own: str, *, finite: bool = False) -> Tensor:
        """A tensor in the shape and type of one of the model's, of finite numbers if it is not a mask."""
        if own not in self._wanted:
            raise _another(f"{_short(name)} is in only one of them")
        wanted = self._wanted[own]
        if tensor.shape != wanted.shape:
            raise _another(f"{_short(name)} is {tuple(tensor.shape)} instead of {tuple(wanted.shape)}")
        if tensor.dtype != wanted.dtype:
            if tensor.dtype != self._converts or not wanted.dtype.is_floating_point:
                raise _another(f"{_short(name)} is {_kind(tensor.dtype)} instead of {_kind(wanted.dtype)}")
            tensor, self.converted = tensor.to(wanted.dtype), True
        if (finite or wanted.finite) and not _is_finite(tensor):
            raise MismatchError(f"the checkpoint holds numbers that are not finite in {_short(name)}")
        return tensor

    def _memory(self, name: str, tensor: Tensor, own: str, what: str) -> Tensor:
        """What the optimizer remembers of a parameter: in its shape, or a count of steps."""
        if own not in self._parameters or what not in self._known:
            raise _another(f"{_short(name)} is in only one of them")
        if what != "step":
            return self._fit(name, tensor, own, finite=True)
        if tensor.shape != () or tensor.dtype not in _COUNTED or not 0 <= float(tensor) <= 2**53:
            raise _another(f"{_short(name)} is not a count of steps")
        return tensor

    def _note(self, name: str, tensor: Tensor, what: str, of: str | None) -> dict[str, Tensor]:
        """What local SGD keeps beside the model: a tensor of the model's, or a few numbers."""
        if of is not None:
            own = self._named(of)
            fitting = self._fit(name, tensor, own)
            return {f"average/{what}/{self._wanted[own].name}": fitting}
        right = tensor.dtype in (torch.int64, torch.float64) and tensor.dim() == (what in _OF_RANKS)
        if not right or (what != "losses" and not bool((tensor >= 0).all() and _is_finite(tensor))):
            raise MismatchError(f"the checkpoint's {_short(name)} is not what local SGD notes")
        return {name: tensor}

    def _complete(
        self, held: Mapping[str, Collection[str]], remembered: Mapping[tuple[str, str], set[str]]
    ) -> None:
        """All of the model for all who have any of it, and all or nothing of a parameter's memory."""
        holders = {"", *(holder for holder, _ in remembered if not holder.startswith("rank/")), *held}
        for holder in sorted(holders):
            if missing := sorted(self._wanted.keys() - set(held.get(holder, ()))):
                raise _another(f"{holder}model/{missing[0]} is in only one of them")
        for (holder, own), kinds in remembered.items():
            if missing := sorted(self._needed - kinds):
                raise _another(f"{holder}optimizer/{missing[0]}/{own} is in only one of them")


def without_optimizer(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All but what an optimizer remembered, of whomever."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = _HELD.fullmatch(name)
        if parts is None or parts["what"] is None:
            found[name] = tensor
    return found


def _wanted(name: str, tensor: Tensor) -> TensorSpec:
    """As it was built. What is trained must be finite; what is not, where it was built so."""
    built = tensor.detach()
    trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
    # of a frozen tensor in shards this rank has seen only a part
    return TensorSpec(
        name, built.shape, built.dtype, trained or (type(built) is Tensor and _is_finite(built))
    )


def _remembered(recipe: Recipe) -> set[str]:
    """What the recipe's optimizer remembers of a parameter, found by letting it step once."""
    probe = torch.zeros(1)
    probe.grad = torch.zeros_like(probe)
    optimizer = optimizers.build(recipe, [("probe", probe)], ())
    optimizer.step()
    return {what for what, value in optimizer.state[probe].items() if isinstance(value, Tensor)}


def _check_notes(tensors: Mapping[str, Tensor], ranks: int) -> None:
    """Where workers were counted, all that is read with the counts is there."""
    if "average/used" not in tensors:
        return
    for name in ("average/outer", *(f"average/{what}" for what in _OF_RANKS)):
        if name not in tensors or (tensors[name].dim() and len(tensors[name]) != ranks):
            raise MismatchError(f"the checkpoint's {name} is not what {ranks} workers of local SGD note")


def _is_finite(tensor: Tensor) -> bool:
    numbers = tensor.is_floating_point() or tensor.is_complex()
    return not numbers or all(bool(torch.isfinite(part).all()) for part in _parts(tensor))


def _parts(tensor: Tensor) -> Iterable[Tensor]:
    """A large tensor in parts, so that what is asked of it takes little memory."""
    if tensor.element_size() == 1:  # float8, of which torch cannot say whether it is finite
        tensor = tensor.float()
    return torch.split(tensor.reshape(-1), 1 << 20)


def _another(how: str) -> MismatchError:
    return MismatchError(f"the checkpoint is of another model: {how}")


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _short(name: str) -> str:
    """A name as long as a sentence can bear, in letters that a terminal can."""
    shown = name if name.isprintable() else ascii(name)
    return shown if len(shown) <= 100 else f"{shown[:100]}..."
