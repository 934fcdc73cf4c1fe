"""`manyhands list`: the members of each axis, and the options of one of them."""

from __future__ import annotations

import json as json_format
import textwrap
from types import UnionType
from typing import Annotated, Any, get_origin

import typer

from manyhands.core import formatting, registry
from manyhands.core.errors import unknown
from manyhands.launchers import LAUNCHERS
from manyhands.recipes import RECIPES
from manyhands.strategies import STRATEGIES
from manyhands.tasks import TASKS
from manyhands.transports import TRANSPORTS

EXAMPLES = """Examples:

manyhands list

manyhands list tasks

manyhands list mnist-cnn        (the options of a task)

manyhands list pipeline         (the options of a strategy)"""

AXES: dict[str, registry.Axis] = {
    "tasks": TASKS,
    "recipes": RECIPES,
    "strategies": STRATEGIES,
    "transports": TRANSPORTS,
    "launchers": LAUNCHERS,
}


def list_(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="WHAT", help="tasks, recipes, strategies, transports, launchers, or one of their members."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
) -> None:
    """List what can be chosen: tasks, recipes, strategies, transports, launchers."""
    if what is None or what in AXES:
        chosen = {what: AXES[what]} if what else AXES
        _print_axes(chosen, json)
    else:
        _print_member(what, json)


def _print_axes(chosen: dict[str, registry.Axis], json: bool) -> None:
    if json:
        print(
            json_format.dumps(
                {axis: {n: m.says for n, m in rows.items()} for axis, rows in chosen.items()}, indent=2
            )
        )
        return
    width = max(len(name) for rows in chosen.values() for name in rows)
    for number, (axis, rows) in enumerate(chosen.items()):
        if len(chosen) > 1:
            print(f"{chr(10) if number else ''}{axis}")
        for name, row in rows.items():
            print(f"  {name:<{width}}  {row.says}")


def _print_member(name: str, json: bool) -> None:
    """Print a member and its options: flags for a strategy, --set for a task or a recipe."""
    if name in RECIPES:
        builder = registry.member("recipe", RECIPES, name)
    elif name in STRATEGIES:
        builder = STRATEGIES[name].options
    elif name in TASKS or ".py" in name:
        from manyhands.tasks.find import builder as find

        builder = find(name)
    else:
        raise unknown("name", name, [*AXES, *TASKS, *RECIPES, *STRATEGIES])
    prefix = "recipe." if name in RECIPES else "strategy." if name in STRATEGIES else ""
    options = list(registry.options(builder).values())
    about = [STRATEGIES[name].says] if name in STRATEGIES else (builder.__doc__ or "").strip().splitlines()
    if json:
        fields = [
            {
                "option": f"{prefix}{option.name}",
                "type": _type(option.type),
                "default": option.default,
                "description": option.description,
            }
            for option in options
        ]
        print(
            json_format.dumps({"name": name, "says": about[0] if about else "", "options": fields}, indent=2)
        )
        return
    print(formatting.line(f"{name}: {about[0] if about else ''}"))
    if not options:
        print("  (no options)")
    flags = [_flag(prefix, option.name, name in STRATEGIES) for option in options]
    width = max(map(len, flags), default=0)
    for flag, option in zip(flags, options, strict=True):
        print(formatting.line(f"  {flag:<{width}}  {_said(option.type)}, default {_default(option.default)}"))
        if option.description:
            print(textwrap.indent(textwrap.fill(option.description, 74), " " * 6))


def _flag(prefix: str, option: str, own: bool) -> str:
    """How an option is given on the command line: with a flag of its own, or with --set."""
    return f"--{option.replace('_', '-')}" if own else f"--set {prefix}{option}="


def _limit(limit: Any) -> str:
    signs = {"Ge": ">=", "Gt": ">", "Le": "<=", "Lt": "<"}
    name = type(limit).__name__
    return f"{signs.get(name, name)} {getattr(limit, name.lower(), '')}".strip()


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(f"{part:.3g}" for part in value) or "none"
    return "none" if value in (None, "") else str(value)


# for one value, and for several values with commas between them
_WORDS = {
    int: ("whole number", "whole numbers"),
    float: ("number", "numbers"),
    bool: ("true or false", ""),
    str: ("text", "texts"),
    type(None): ("none", ""),
}


def _said(kind: Any) -> str:
    """A type in words: `whole number >= 1`, `number or none`, `whole numbers`."""
    if hasattr(kind, "__metadata__"):
        return f"{_said(kind.__origin__)} {_limits(kind)}"
    if isinstance(kind, UnionType):
        return " or ".join(map(_said, kind.__args__))
    if get_origin(kind) is tuple:
        return _WORDS[kind.__args__[0]][1]
    return _WORDS[kind][0] if kind in _WORDS else _type(kind)


def _type(kind: Any) -> str:
    """A type as it is written in Python, for JSON."""
    if hasattr(kind, "__metadata__"):  # Annotated: the type, then its limits
        return f"{_type(kind.__origin__)} {_limits(kind)}"
    choices = getattr(kind, "__args__", ())
    if str(kind).startswith("typing.Literal"):
        return " | ".join(map(str, choices))
    return str(getattr(kind, "__name__", kind) if isinstance(kind, type) else kind).replace("typing.", "")


def _limits(kind: Any) -> str:
    return ", ".join(map(_limit, kind.__metadata__))
