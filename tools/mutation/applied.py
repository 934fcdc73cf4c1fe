"""The table against a tree: where each function is, what its module becomes, which tests there are."""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from edits import EditError
from table import AREAS, FUNCTIONS, NEW, REMOVED, Mutant

PACKAGE = "manyhands"


class TableError(Exception):
    """The table does not fit the tree."""


class DroppedError(Exception):
    """A refactoring has removed the function that a mutant changes; the message says why."""


@dataclass(frozen=True)
class Mutated:
    """A mutant in a tree: the module that is written, and the lines that differ."""

    mutant: Mutant
    module: str
    source: str
    change: list[str]


def place_of(function: str, source: Path) -> tuple[int, str, str]:
    """The first place of a function that exists: its number in the table, its module and qualified name."""
    for number, place in enumerate(FUNCTIONS[function]):
        module, _, name = place.partition("::")
        path = source / PACKAGE / module
        if path.is_file() and node_of(ast.parse(path.read_text()), name) is not None:
            return number, module, name
    if function in REMOVED:
        raise DroppedError(REMOVED[function])
    raise TableError(f"{function} is in none of {', '.join(FUNCTIONS[function])}")


def node_of(tree: ast.AST, name: str) -> ast.AST | None:
    """The function or class with a qualified name."""
    here: ast.AST | None = tree
    for part in name.split("."):
        inside = ast.iter_child_nodes(here) if here is not None else iter(())
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        here = next((node for node in inside if isinstance(node, kinds) and node.name == part), None)
    return here


def mutate(mutant: Mutant, source: Path) -> Mutated:
    """Apply a mutant's edit to its module; raise `TableError` or `DroppedError` if that is impossible."""
    number, module, name = place_of(mutant.function, source)
    edit = mutant.after if number and mutant.after is not None else mutant.edit
    tree = ast.parse((source / PACKAGE / module).read_text())
    before = ast.unparse(tree)
    node = node_of(tree, name)
    assert node is not None
    try:
        edit.apply(node)
    except EditError as error:
        raise TableError(str(error)) from None
    after = ast.unparse(ast.fix_missing_locations(tree))
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0))
    change = [line for line in lines[2:] if not line.startswith("@@")]
    if not change:
        raise TableError("the edit changes nothing")
    return Mutated(mutant, module, after, change)


def tests_of(area: str, tree: Path) -> list[str]:
    """What pytest is told to run: of each line of the table, the first that exists."""
    found = []
    for line in AREAS[area]:
        there = [test for test in line if test == NEW or _is_test(test, tree)]
        if not there:
            raise TableError(f"no tests {' or '.join(line)}")
        found.append(there[0])
    return [test for test in found if test != NEW]


def _is_test(test: str, tree: Path) -> bool:
    file, *names = test.split("::")
    path = tree / file
    return path.is_file() and all(re.search(rf"\b{name}\b", path.read_text()) for name in names)
