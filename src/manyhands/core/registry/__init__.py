"""An axis is a plain dict from a name to a row that says where its member lives; it is imported when chosen.

The rows of strategies, transports and launchers are in this folder, because what reads records asks them too.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, TypeAdapter, ValidationError

from manyhands.core.errors import UsageError, choices, shown, unknown

# types for the options of a builder: what they allow is checked before it is called
Count = Annotated[int, Ge(1), Le(10**9)]
Positive = Annotated[float, Gt(0)]
Fraction = Annotated[float, Ge(0), Lt(1)]


@dataclass(frozen=True)
class Entry:
    """One row of an axis: `module:attribute`, and what it is in one line."""

    where: str
    says: str


Axis = Mapping[str, Entry]
Builder = Callable[..., Any]


def member(what: str, axis: Axis, name: str) -> Any:
    """Import the member of an axis by its name, or say which names there are."""
    if name not in axis:
        raise unknown(what, name, axis)
    return load(axis[name].where)


def load(where: str) -> Any:
    """Import `module:attribute`."""
    module, attribute = where.split(":")
    return getattr(importlib.import_module(module), attribute)


class Option(NamedTuple):
    """One keyword that a member's builder takes."""

    name: str
    type: Any
    default: Any
    description: str = ""


def options(builder: Builder | type[BaseModel]) -> dict[str, Option]:
    """The options of a member: the fields of its model, or the parameters of its builder that have a default.

    A parameter without an annotation has the type of its default.
    """
    if isinstance(builder, type) and issubclass(builder, BaseModel):
        return {
            name: Option(name, field.annotation, field.default, field.description or "")
            for name, field in builder.model_fields.items()
        }
    try:
        signature = inspect.signature(builder, eval_str=True)
    except NameError:  # a function that was sent to a worker has left the names of its annotations behind
        signature = inspect.signature(builder)
    return {
        name: Option(name, _type_of(parameter), parameter.default)
        for name, parameter in signature.parameters.items()
        if parameter.default is not parameter.empty or parameter.kind is parameter.KEYWORD_ONLY
    }


def _type_of(parameter: inspect.Parameter) -> Any:
    if parameter.annotation is not parameter.empty and not isinstance(parameter.annotation, str):
        return parameter.annotation
    return type(parameter.default) if isinstance(parameter.default, bool | int | float | str) else Any


def parse(owner: str, builder: Builder | type[BaseModel], given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the given options against the builder's model or signature, and turn text into its types."""
    known = options(builder)
    for name in given:
        if name not in known:
            raise UsageError(f"{owner} has no option {shown(name)} ({choices(name, known)})")
    return {name: _convert(owner, known[name], value) for name, value in given.items()}


def _convert(owner: str, option: Option, value: Any) -> Any:
    kind = option.type
    if isinstance(value, str) and str(kind).startswith("tuple["):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if value is None or (isinstance(value, str) and value.lower() == "none" and type(None) in _union(kind)):
        return None
    try:
        found = TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        reason = reason_of(error).removeprefix("should be ")
        raise UsageError(f"{owner}: option {option.name} = {shown(value)} is not {reason}") from None
    if isinstance(found, int) and abs(found) >= 2**63:
        raise UsageError(f"{owner}: option {option.name} = {shown(value)} is not below 2**63")
    if isinstance(found, float) and not math.isfinite(found):
        raise UsageError(f"{owner}: option {option.name} = {shown(value)} is not a finite number")
    return found


def reason_of(error: ValidationError) -> str:
    """`should be a valid integer`; where there are choices, all of them."""
    first = error.errors()[0]
    if first["type"] == "int_parsing_size":
        return "should be a whole number below 2**63"
    text = first["msg"].lower().removeprefix("input ")
    return text if first["type"] == "literal_error" else text.split(",")[0]


def _union(kind: Any) -> tuple[Any, ...]:
    return tuple(getattr(kind, "__args__", ()))
