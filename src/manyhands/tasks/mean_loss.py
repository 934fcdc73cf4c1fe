"""Check that a loss is the mean over its samples, at its first call and with the arguments of that call.

A global mean is computed from uneven parts, each weighted by its size (law 4). So the loss of a batch must be
equal to the weighted losses of two uneven parts of it. The gradients with respect to the outputs must be
equal too: they differ even if the parts happen to have the same loss. The model is not called again, and the
run does not change by a bit: the loss is called with copies, and random states are restored.
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
MAX_COPY = 16 * 2**20  # bytes of outputs that are copied: the check must not raise the peak memory


class MeanLoss:
    """A task's loss, checked when it first gets two samples or more."""

    def __init__(self, loss: Loss) -> None:
        self._loss, self._checked = loss, False

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """Return the loss, unchanged."""
        if not self._checked:
            self._checked = check(self._loss, outputs, targets)
        return self._loss(outputs, targets)


def check(loss: Loss, outputs: Any, targets: Any) -> bool:
    """Refuse a loss that is not the mean over its samples. False if there is only one sample."""
    size = _samples(outputs, targets)
    if size is not None and size < 2:
        return False
    if size is not None:
        size = _affordable(outputs, size)
        outputs, targets = _rows(outputs, targets, slice(0, size))
    with _isolated(loss, outputs) as copied:
        whole = _call(copied, outputs, targets)
        if not isinstance(whole.value, Tensor) or whole.value.ndim:
            raise _not_a_scalar(whole.value)
        if size is None:  # not every tensor has one row per sample: they cannot be divided
            return True
        rounding = _Rounding.of(whole, outputs, targets)
        parts = _parts(copied, outputs, targets, size)
        if parts is None or rounding.allows(whole, parts):
            return True
        if not rounding.allows(whole, _call(copied, outputs, targets)):  # the loss is random
            return True
    raise UsageError(
        f"the loss is not the mean over its samples: it is {float(whole.value):.6g} for {size} samples, but "
        f"{float(parts.value):.6g} when computed from two parts of them, each weighted by its size; use "
        'reduction="mean", and instead of class weights or ignore_index use reduction="none", weight each '
        "sample yourself and return the .mean() over all samples"
    )


class _Called(NamedTuple):
    value: Tensor
    gradients: list[Tensor]  # with respect to the outputs

    @property
    def scale(self) -> float:
        """The largest absolute gradient."""
        return max((_largest(gradient) for gradient in self.gradients), default=0.0)


class _Rounding(NamedTuple):
    """How much two results may differ: half of the digits, or rounding errors around zero."""

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
        """Whether they are equal. NaN and infinity are allowed: the run reports divergence itself."""
        if not bool(one.value.isfinite()) or not all(bool(g.isfinite().all()) for g in one.gradients):
            return True
        bound = self.value + self.relative * max(_largest(one.value), _largest(other.value))
        pairs = [(one.value, other.value, bound)]
        bound = self.gradient + self.relative * one.scale
        pairs += [(a, b, bound) for a, b in zip(one.gradients, other.gradients, strict=True)]
        # written so that NaN, from a part in which no sample counts, is not allowed
        return all(_largest(a.double() - b.double()) <= bound for a, b, bound in pairs)


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _call(loss: Loss, outputs: Any, targets: Any) -> _Called:
    """Call with copies, so that the loss may overwrite them and no gradient reaches the model."""
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
    """The same from two uneven parts, or None if the loss does not accept fewer samples."""
    middle = 1 + size // 3 if size > 2 else 1

    try:
        first = _call(loss, *_rows(outputs, targets, slice(0, middle)))
        second = _call(loss, *_rows(outputs, targets, slice(middle, size)))
    except Exception:  # noqa: BLE001 (the loss accepts the whole batch only: there is nothing to compare)
        return None
    a, b = middle / size, (size - middle) / size
    pairs = zip(first.gradients, second.gradients, strict=True)
    return _Called(first.value * a + second.value * b, [torch.cat([one * a, two * b]) for one, two in pairs])


def _samples(*trees: Any) -> int | None:
    """The number of samples, or None if it is unclear."""
    leaves = [leaf for tree in trees for leaf in pytree.tree_leaves(tree) if leaf is not None]
    if not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves):
        return None
    sizes = {int(leaf.shape[0]) for leaf in leaves}
    return sizes.pop() if len(sizes) == 1 else None


def _affordable(outputs: Any, size: int) -> int:
    """The number of samples to check, limited by the memory of their copies. Two are enough."""
    nbytes = sum(leaf.nbytes for leaf in pytree.tree_leaves(outputs) if leaf is not None)
    return size if nbytes <= MAX_COPY else max(2, size * MAX_COPY // nbytes)


def _rows(outputs: Any, targets: Any, rows: slice) -> tuple[Any, Any]:
    """Some samples of outputs and targets."""
    selected: tuple[Any, Any] = pytree.tree_map_only(Tensor, lambda tensor: tensor[rows], (outputs, targets))
    return selected


@contextmanager
def _isolated(loss: Loss, outputs: Any) -> Iterator[Loss]:
    """A copy of the loss for the check. Its state and all random states are restored afterwards."""
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    devices = {leaf.device.index for leaf in leaves if leaf.is_cuda}
    numbers, state = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=devices):
            yield _copy_of(loss)
    finally:
        np.random.set_state(numbers)
        random.setstate(state)


def _copy_of(loss: Loss) -> Loss:
    """A copy of a loss with its own buffers. Parameters are only read, so they are shared."""
    if not isinstance(loss, nn.Module):
        return loss
    return copy.deepcopy(loss, {id(parameter): parameter for parameter in loss.parameters()})


def _not_a_scalar(value: object) -> UsageError:
    shape = f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    return UsageError(
        f"the loss must be a scalar, the mean over its samples, but is a {shape}: use "
        'reduction="mean" or .mean()'
    )
