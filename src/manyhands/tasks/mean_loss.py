"""Is a loss the mean over its samples? Looked at when it is first called, with what it is called with.

A global mean is put together from uneven parts, each weighted by its size (law 4). So the loss of a batch and
the weighted losses of two uneven parts of it must agree, and so must their gradients with respect to the
outputs: these show it also where the parts happen to have the same loss. The model is not asked again, and
nothing of the run changes by a bit: the loss is tried on copies, and random states are put back.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from manyhands.core.errors import UsageError

Loss = Callable[[Any, Any], Tensor]
ROOM = 16 * 2**20  # bytes of outputs that are copied: what a run needs at its peak must not grow by the look


class MeanLoss:
    """A task's loss, looked at when it is first given two samples or more."""

    def __init__(self, loss: Loss) -> None:
        self._loss, self._checked = loss, False

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """The loss, as it is."""
        if not self._checked:
            self._checked = check(self._loss, outputs, targets)
        return self._loss(outputs, targets)


def check(loss: Loss, outputs: Any, targets: Any) -> bool:
    """Refuse a loss that is not the mean over its samples; false where one sample is too few to tell."""
    size = _samples(outputs, targets)
    if size is not None and size < 2:
        return False
    if size is not None:
        size = _affordable(outputs, size)
        outputs, targets = _rows(outputs, targets, slice(0, size))
    with _untouched(loss, outputs) as again:
        whole = _call(again, outputs, targets)
        if not isinstance(whole.value, Tensor) or whole.value.ndim:
            raise _no_number(whole.value)
        if size is None:  # not a row per sample in every tensor: nobody knows what belongs to which sample
            return True
        rounding = _Rounding.of(whole, outputs, targets)
        parts = _parts(again, outputs, targets, size)
        if parts is None or rounding.allows(whole, parts):
            return True
        if not rounding.allows(whole, _call(again, outputs, targets)):  # it draws random numbers
            return True
    raise UsageError(
        f"the loss is not the mean over its samples: it is {float(whole.value):.6g} for {size} samples, but "
        f"{float(parts.value):.6g} when put together from two parts of them, each weighted by its size; take "
        'reduction="mean", and instead of class weights or ignore_index take reduction="none", weigh each '
        "sample yourself and return the .mean() over all samples"
    )


class _Called(NamedTuple):
    value: Tensor
    gradients: list[Tensor]  # with respect to the outputs

    @property
    def scale(self) -> float:
        """The largest gradient of all."""
        return max((_largest(gradient) for gradient in self.gradients), default=0.0)


class _Rounding(NamedTuple):
    """How far apart two results may be: half the digits, or what rounding leaves of a perfect model's."""

    relative: float
    value: float
    gradient: float

    @classmethod
    def of(cls, whole: _Called, outputs: Any, targets: Any) -> _Rounding:
        held = [leaf for leaf in pytree.tree_leaves(outputs) if leaf is not None and leaf.is_floating_point()]
        kinds = [tensor.dtype for tensor in (*held, whole.value) if tensor.is_floating_point()]
        eps = max((torch.finfo(kind).eps for kind in kinds), default=0.0)
        floor = 16 * eps * (1.0 + max(map(_largest, held), default=0.0))
        terms = max((leaf.numel() for leaf in pytree.tree_leaves(targets) if leaf is not None), default=1)
        return cls(eps**0.5, floor, floor / max(1, terms))

    def allows(self, one: _Called, other: _Called) -> bool:
        """Whether they are the same; a result that is not a number is the diverged run's to explain."""
        if not bool(one.value.isfinite()) or not all(bool(g.isfinite().all()) for g in one.gradients):
            return True
        bound = self.value + self.relative * max(_largest(one.value), _largest(other.value))
        pairs = [(one.value, other.value, bound)]
        bound = self.gradient + self.relative * one.scale
        pairs += [(a, b, bound) for a, b in zip(one.gradients, other.gradients, strict=True)]
        # written so that a part without any sample that counts, which is NaN, is not allowed
        return all(_largest(a.double() - b.double()) <= bound for a, b, bound in pairs)


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _call(loss: Loss, outputs: Any, targets: Any) -> _Called:
    """On copies, so that a loss may write over what it is given and no gradient reaches the model."""
    leaves, tree = pytree.tree_flatten(outputs)
    with torch.inference_mode(False), torch.enable_grad():
        held = [
            _copied(leaf, leaf.is_floating_point()) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        given = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in held]
        value = loss(pytree.tree_unflatten(given, tree), pytree.tree_map_only(Tensor, _copied, targets))
        wanted = [leaf for leaf in held if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not isinstance(value, Tensor) or value.ndim or not value.requires_grad or not wanted:
            return _Called(value, [])
        found = torch.autograd.grad(value, wanted, allow_unused=True, materialize_grads=True)
        return _Called(value.detach(), list(found))


def _copied(tensor: Tensor, trained: bool = False) -> Tensor:
    return torch.empty_like(tensor, requires_grad=False).copy_(tensor.detach()).requires_grad_(trained)


def _parts(loss: Loss, outputs: Any, targets: Any, size: int) -> _Called | None:
    """The same, put together from two uneven parts; none where the loss cannot take fewer samples."""
    cut = 1 + size // 3 if size > 2 else 1

    try:
        first = _call(loss, *_rows(outputs, targets, slice(0, cut)))
        second = _call(loss, *_rows(outputs, targets, slice(cut, size)))
    except Exception:  # noqa: BLE001 (a loss that takes the whole and not a part: there is nothing to compare)
        return None
    a, b = cut / size, (size - cut) / size
    pairs = zip(first.gradients, second.gradients, strict=True)
    return _Called(first.value * a + second.value * b, [torch.cat([one * a, two * b]) for one, two in pairs])


def _samples(*trees: Any) -> int | None:
    """How many samples these are; none where that cannot be told."""
    leaves = [leaf for tree in trees for leaf in pytree.tree_leaves(tree) if leaf is not None]
    if not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves):
        return None
    sizes = {int(leaf.shape[0]) for leaf in leaves}
    return sizes.pop() if len(sizes) == 1 else None


def _affordable(outputs: Any, size: int) -> int:
    """As many of the samples as a few copies of their outputs leave memory for; two are enough to tell."""
    nbytes = sum(leaf.nbytes for leaf in pytree.tree_leaves(outputs) if leaf is not None)
    return size if nbytes <= ROOM else max(2, size * ROOM // nbytes)


def _rows(outputs: Any, targets: Any, rows: slice) -> tuple[Any, Any]:
    """Some samples of both."""
    cut: tuple[Any, Any] = pytree.tree_map_only(Tensor, lambda tensor: tensor[rows], (outputs, targets))
    return cut


@contextmanager
def _untouched(loss: Loss, outputs: Any) -> Iterator[Loss]:
    """The loss to try things with; neither what it remembers nor a random number is used up by that."""
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    devices = {leaf.device.index for leaf in leaves if leaf.is_cuda}
    numbers, state = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=devices):
            yield _twin(loss)
    finally:
        np.random.set_state(numbers)
        random.setstate(state)


def _twin(loss: Loss) -> Loss:
    """A copy of what a loss remembers; its parameters, which are only read, are shared."""
    if not isinstance(loss, nn.Module):
        return loss
    return copy.deepcopy(loss, {id(parameter): parameter for parameter in loss.parameters()})


def _no_number(value: object) -> UsageError:
    shape = f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    return UsageError(
        f"the loss must be one number, the mean over its samples, and is a {shape}: use "
        'reduction="mean" or .mean()'
    )
