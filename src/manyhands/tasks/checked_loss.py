"""Check a loss at its first call, with the arguments of that call: a mean over samples, or (sum, weight).

A global mean is computed from uneven parts (law 4). So the loss of a batch must be equal to the losses of two
uneven parts of it, each weighted by its size; a sum and its weight must be the sums of those of the parts.
The gradients with respect to the outputs must be equal too: they differ even if the parts happen to have the
same loss. The model is not called again, and the run does not change by a bit: the loss is called with
copies, and random states are restored.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyhands.core.errors import UsageError
from manyhands.data import generators, trees
from manyhands.data.generators import RandomStates
from manyhands.data.trees import Tree

Loss = Callable[[Tree, Tree], Any]
MAX_COPY = 16 * 2**20  # bytes of outputs that are copied: the check must not raise the peak memory


class CheckedLoss:
    """A task's loss, checked when it first gets two samples or more."""

    def __init__(self, loss: Loss) -> None:
        self._loss, self._checked = loss, False

    def __call__(self, outputs: Tree, targets: Tree) -> Tensor | tuple[Tensor, Tensor]:
        """Return the loss, unchanged: a mean, or a sum and its weight."""
        if not self._checked:
            self._checked = check(self._loss, outputs, targets)
        found = self._loss(outputs, targets)
        return found if isinstance(found, Tensor) else tuple(found)


def check(loss: Loss, outputs: Tree, targets: Tree) -> bool:
    """Refuse a loss that is neither a mean over samples nor a sum. False if there is only one sample."""
    size = _samples(outputs, targets)
    if size is not None and size < 2:
        return False
    if size is not None:
        fewer = _affordable(outputs, size)
        outputs, targets = _rows((outputs, targets), slice(0, fewer), size)
        size = fewer
    with _isolated(loss, outputs) as copied:
        before = RandomStates.now()
        whole = _call(copied, outputs, targets)
        random = not before.unchanged
        if size is None or _needs_whole(outputs, whole, size):  # it cannot be divided
            return True
        rounding = _Rounding.of(whole, outputs, targets)
        parts = _parts(copied, outputs, targets, size)
        if parts is None or rounding.allows(whole, parts):
            return True
        if random or not rounding.allows(whole, _call(copied, outputs, targets)):  # the loss is random
            return True
    if whole.weight is not None:
        raise UsageError(
            f"the loss returns the sum {float(whole.value):.6g} and the weight {whole.weight:.6g} for {size} "
            f"samples, but {float(parts.value):.6g} and {parts.weight:.6g} when computed from two parts of "
            "them: both must be sums over samples, not means"
        )
    raise UsageError(
        f"the loss is not the mean over its samples: it is {float(whole.value):.6g} for {size} samples, but "
        f"{float(parts.value):.6g} when computed from two parts of them, each weighted by its size; use "
        'reduction="mean", or for class weights, ignore_index and tokens return (sum, weight): the loss with '
        'reduction="sum", and what the sum over all samples is to be divided by'
    )


class _Called(NamedTuple):
    value: Tensor  # the mean, or the sum if there is a weight
    gradients: list[Tensor]  # with respect to the outputs
    weight: float | None = None

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
    def of(cls, whole: _Called, outputs: Tree, targets: Tree) -> _Rounding:
        held = [tensor for tensor in trees.tensors(outputs) if tensor.is_floating_point()]
        kinds = [tensor.dtype for tensor in (*held, whole.value) if tensor.is_floating_point()]
        eps = max((torch.finfo(kind).eps for kind in kinds), default=0.0)
        floor = 16 * eps * (1.0 + max(map(_largest, held), default=0.0))
        terms = max((tensor.numel() for tensor in trees.tensors(targets)), default=1)
        if whole.weight is not None:  # sums, not means
            return cls(eps**0.5, floor * terms, floor)
        return cls(eps**0.5, floor, floor / max(1, terms))

    def allows(self, one: _Called, other: _Called) -> bool:
        """Whether they are equal. NaN and infinity are allowed: the run reports divergence itself."""
        if not bool(one.value.isfinite()) or not all(bool(g.isfinite().all()) for g in one.gradients):
            return True
        bound = self.value + self.relative * max(_largest(one.value), _largest(other.value))
        pairs = [(one.value, other.value, bound)]
        bound = self.gradient + self.relative * one.scale
        pairs += [(a, b, bound) for a, b in zip(one.gradients, other.gradients, strict=True)]
        if one.weight is not None and other.weight is not None:
            bound = self.relative * max(abs(one.weight), abs(other.weight))
            if not abs(one.weight - other.weight) <= bound:
                return False
        # written so that NaN, from a part in which no sample counts, is not allowed
        return all(_largest(a.double() - b.double()) <= bound for a, b, bound in pairs)


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _call(loss: Loss, outputs: Tree, targets: Tree) -> _Called:
    """Call with copies, so that the loss may overwrite them and no gradient reaches the model."""
    with torch.inference_mode(False), torch.enable_grad():
        held = trees.mapped(lambda tensor: _copied(tensor, tensor.is_floating_point()), outputs)
        value, weight = _value_and_weight(
            loss(trees.mapped(Tensor.clone, held), trees.mapped(_copied, targets))
        )
        wanted = [tensor for tensor in trees.tensors(held) if tensor.requires_grad]
        if not value.requires_grad or not wanted:
            return _Called(value, [], weight)
        found = torch.autograd.grad(value, wanted, allow_unused=True, materialize_grads=True)
        return _Called(value.detach(), list(found), weight)


def _value_and_weight(found: Any) -> tuple[Tensor, float | None]:
    """A scalar, or a scalar and its weight."""
    weight: Any = None
    if isinstance(found, tuple | list) and len(found) == 2:
        found, weight = found
        if isinstance(weight, Tensor) and not weight.ndim and not weight.is_complex():
            weight = weight.item()
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight >= 0:
            shown = f"shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
            raise UsageError(
                "a loss that returns two values must return (sum, weight), where the weight is one number of "
                f"at least 0, such as the number of tokens, not {shown:.60}"
            )
    if not isinstance(found, Tensor) or found.ndim:
        raise _not_a_scalar(found)
    return found, weight


def _copied(tensor: Tensor, trained: bool = False) -> Tensor:
    return torch.empty_like(tensor, requires_grad=False).copy_(tensor.detach()).requires_grad_(trained)


def _parts(loss: Loss, outputs: Tree, targets: Tree, size: int) -> _Called | None:
    """The same from two uneven parts, or None if the loss does not accept fewer samples."""
    middle = 1 + size // 3 if size > 2 else 1

    try:
        first = _call(loss, *_rows((outputs, targets), slice(0, middle), size))
        second = _call(loss, *_rows((outputs, targets), slice(middle, size), size))
    except Exception:  # noqa: BLE001 (the loss accepts the whole batch only: there is nothing to compare)
        return None
    weight = None
    a, b = middle / size, (size - middle) / size
    if first.weight is not None and second.weight is not None:
        a = b = 1.0
        weight = first.weight + second.weight
    divided = [_has_rows(tensor, size) for tensor in trees.tensors(outputs) if tensor.is_floating_point()]
    gradients = [
        torch.cat([one * a, two * b]) if apart else one * a + two * b
        for one, two, apart in zip(first.gradients, second.gradients, divided, strict=False)
    ]
    return _Called(first.value * a + second.value * b, gradients, weight)


def _samples(outputs: Tree, targets: Tree) -> int | None:
    """The number of samples, or None if it is unclear: all targets have one row each, else all outputs."""
    for tree in (targets, outputs):
        sizes = {int(tensor.shape[0]) for tensor in trees.tensors(tree) if tensor.ndim}
        if sizes:
            return sizes.pop() if len(sizes) == 1 else None
    return None


def _has_rows(tensor: Tensor, size: int) -> bool:
    return tensor.ndim > 0 and tensor.shape[0] == size


def _rows(tree: Tree, which: slice, size: int) -> Tree:
    """Some samples; what has not one row per sample stays as it is, such as a scalar or a cache."""
    return trees.mapped(lambda tensor: tensor[which] if _has_rows(tensor, size) else tensor, tree)


def _needs_whole(outputs: Tree, whole: _Called, size: int) -> bool:
    """Whether the loss depends on an output that has rows, but not one per sample."""
    held = [tensor for tensor in trees.tensors(outputs) if tensor.is_floating_point()]
    return any(
        tensor.ndim > 0 and not _has_rows(tensor, size) and bool(gradient.any())
        for tensor, gradient in zip(held, whole.gradients, strict=False)
    )


def _affordable(outputs: Tree, size: int) -> int:
    """The number of samples to check, limited by the memory of their copies. Two are enough."""
    nbytes = sum(tensor.nbytes for tensor in trees.tensors(outputs))
    return size if nbytes <= MAX_COPY else max(2, size * MAX_COPY // nbytes)


@contextmanager
def _isolated(loss: Loss, outputs: Tree) -> Iterator[Loss]:
    """A copy of the loss for the check. Its state and all random states are restored afterwards."""
    devices = {tensor.device.index for tensor in trees.tensors(outputs) if tensor.is_cuda}
    with generators.kept(), torch.random.fork_rng(devices=devices):
        yield _copy_of(loss)


def _copy_of(loss: Loss) -> Loss:
    """A copy of a loss with its own buffers. Parameters are only read, so they are shared."""
    if not isinstance(loss, nn.Module):
        return loss
    return copy.deepcopy(loss, {id(parameter): parameter for parameter in loss.parameters()})


def _not_a_scalar(value: object) -> UsageError:
    shape = f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    return UsageError(
        f"the loss must be a scalar, the mean over its samples, or (sum, weight), but is a {shape}: use "
        'reduction="mean" or .mean()'
    )
