"""Trees of tensors: one tensor, or dicts, tuples, lists and dataclasses of them.

Inputs, targets and outputs may be trees. Besides tensors, a tree may hold None, numbers and texts, which are
passed on as they are. A mapping of any kind becomes a dict; a dataclass and a named tuple are made anew from
their fields. Most models take one tensor, and each function here tries that first: it costs nothing.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manyhands.core.errors import UsageError, kind_of

Tree = Any
"""A tensor, or a dict, tuple, list or dataclass of trees; see above."""

Structure = Any
"""What is left of a tree without its tensors, as JSON can write it."""

_PLAIN = (type(None), bool, int, float, str)


def mapped(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """The same tree with every tensor replaced by the function's result."""
    if isinstance(tree, Tensor):
        return function(tree)
    members = _members(tree)
    if members is None:
        return tree
    return _made(tree, [(name, mapped(function, value)) for name, value in members])


def each(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """The same tree with everything that is not a container replaced by the function's result."""
    members = None if isinstance(tree, Tensor) else _members(tree)
    if members is None:
        return function(tree)
    return _made(tree, [(name, each(function, value)) for name, value in members])


def tensors(tree: Tree) -> list[Tensor]:
    """All tensors of a tree, in its order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [tensor for _, value in _members(tree) or () for tensor in tensors(value)]


def named(tree: Tree, name: str) -> Iterator[tuple[str, Any]]:
    """Whatever is not a container, each with its path: `inputs.mask`, `inputs[0]`."""
    members = None if isinstance(tree, Tensor) else _members(tree)
    if members is None:
        yield name, tree
        return
    for key, value in members:
        yield from named(value, f"{name}[{key}]" if isinstance(key, int) else f"{name}.{key}")


def size(*trees: Tree) -> int:
    """The number of samples: the length of the first tensor that has a first dimension."""
    for tree in trees:
        for tensor in tensors(tree):
            if tensor.ndim:
                return int(tensor.shape[0])
    return 0


def rows(tree: Tree, which: slice) -> Tree:
    """Some samples: these rows of every tensor that has rows."""
    return mapped(lambda tensor: tensor[which] if tensor.ndim else tensor, tree)


def equal(one: Tree, other: Tree) -> bool:
    """Whether two trees have the same structure and the same values; NaN is equal to NaN."""
    if structure(one) != structure(other):
        return False
    return all(_equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


class Layout(NamedTuple):
    """What another process must know before it receives trees of this kind."""

    structure: Structure
    sizes: list[int]  # bytes of each tensor
    floating: list[bool]  # whether each is floating-point, and so may have a gradient

    @classmethod
    def of(cls, tree: Tree) -> Layout:
        """The layout of a tree."""
        held = tensors(tree)
        return cls(structure(tree), [tensor.nbytes for tensor in held], [t.is_floating_point() for t in held])


def structure(tree: Tree) -> Structure:
    """What `rebuild` needs besides the tensors; a UsageError if it could not travel to another process."""
    if isinstance(tree, Tensor):
        return "tensor"
    members = _members(tree)
    if members is None:
        if isinstance(tree, _PLAIN):
            return {"value": tree}
        raise UsageError(f"{kind_of(tree)} cannot be sent between stages: send tensors")
    held = [[name, structure(value)] for name, value in members]
    if _is_record(tree):
        kind = type(tree)
        return {"class": f"{kind.__module__}:{kind.__qualname__}", "fields": held}
    if isinstance(tree, Mapping):
        return {"dict": held}
    return {"tuple" if isinstance(tree, tuple) else "list": [value for _, value in held]}


def rebuild(found: Structure, parts: Iterator[Tensor]) -> Tree:
    """A tree of this structure from tensors in the order of `tensors`.

    A class must be loaded in this process already; nothing is imported because a message names it.
    """
    if found == "tensor":
        return next(parts)
    (kind, held), *rest = found.items()
    if kind == "value":
        return held
    if kind == "dict":
        return {name: rebuild(value, parts) for name, value in held}
    if kind == "class":
        fields = rest[0][1]
        return _class(held)(**{name: rebuild(value, parts) for name, value in fields})
    members = [rebuild(value, parts) for value in held]
    return tuple(members) if kind == "tuple" else members


def _members(tree: Tree) -> list[tuple[Any, Tree]] | None:
    """The parts of a container by name or number; None if it is not one."""
    if isinstance(tree, Mapping) and not _is_dataclass(tree):
        return list(tree.items())
    if _is_dataclass(tree):
        return [(field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return list(zip(tree._fields, tree, strict=True))
    return list(enumerate(tree)) if isinstance(tree, tuple | list) else None


def _made(like: Tree, members: list[tuple[Any, Tree]]) -> Tree:
    if _is_record(like):
        return type(like)(**dict(members))
    if isinstance(like, Mapping):
        return dict(members)
    return (
        type(like)(value for _, value in members)
        if type(like) in (tuple, list)
        else tuple(value for _, value in members)
    )


def _is_dataclass(tree: Tree) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def _is_record(tree: Tree) -> bool:
    """Whether it is made from fields by name."""
    return _is_dataclass(tree) or (isinstance(tree, tuple) and hasattr(tree, "_fields"))


def _class(name: str) -> Callable[..., Tree]:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and (dataclasses.is_dataclass(found) or hasattr(found, "_fields"))):
        raise UsageError(f"{name} is not a dataclass or a named tuple that every worker has loaded")
    return found
