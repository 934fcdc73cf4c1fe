"""Edits of a syntax tree: each changes one thing inside one function, found by what it is, not by its line.

Every edit counts from 0 within its function, in the order of the syntax tree, nested functions included: a
condition comes before what it decides. An edit that finds nothing raises `EditError`: a mutant that does not
apply is never passed over.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

OPERATORS: dict[str, type[ast.operator]] = {
    "+": ast.Add, "-": ast.Sub, "*": ast.Mult, "/": ast.Div, "//": ast.FloorDiv, "%": ast.Mod, "**": ast.Pow,
    "^": ast.BitXor, "&": ast.BitAnd, "|": ast.BitOr, ">>": ast.RShift, "<<": ast.LShift,
}  # fmt: skip
COMPARISONS: dict[str, type[ast.cmpop]] = {
    "<": ast.Lt, "<=": ast.LtE, ">": ast.Gt, ">=": ast.GtE, "==": ast.Eq, "!=": ast.NotEq, "is": ast.Is,
    "is not": ast.IsNot, "in": ast.In, "not in": ast.NotIn,
}  # fmt: skip
STATEMENTS: dict[str, type[ast.stmt]] = {
    "call": ast.Expr, "assign": ast.Assign, "add": ast.AugAssign, "if": ast.If, "for": ast.For,
    "return": ast.Return, "raise": ast.Raise, "continue": ast.Continue, "delete": ast.Delete,
}  # fmt: skip


class EditError(Exception):
    """The function is there, and what is to be edited is not."""


@dataclass(frozen=True)
class Edit:
    """One change of a function's tree, in place; `text` says it in a few characters."""

    text: str
    apply: Callable[[ast.AST], None]


def below(node: ast.AST) -> Iterator[ast.AST]:
    """Everything inside, depth first."""
    for child in ast.iter_child_nodes(node):
        yield child
        yield from below(child)


def operator(old: str, new: str, n: int = 0) -> Edit:
    """The n-th `old` between two numbers, or of an `old=`, becomes `new`."""

    def apply(root: ast.AST) -> None:
        found = [
            node
            for node in below(root)
            if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, OPERATORS[old])
        ]
        _at(found, n, f"operator {old}").op = OPERATORS[new]()

    return Edit(f"operator {old} -> {new} [{n}]", apply)


def compare(old: str, new: str, n: int = 0) -> Edit:
    """The n-th comparison by `old` is by `new`."""

    def apply(root: ast.AST) -> None:
        places = [
            (node, at)
            for node in below(root)
            if isinstance(node, ast.Compare)
            for at, op in enumerate(node.ops)
            if type(op) is COMPARISONS[old]
        ]
        node, at = _at(places, n, f"comparison {old}")
        node.ops[at] = COMPARISONS[new]()

    return Edit(f"compare {old} -> {new} [{n}]", apply)


def constant(old: object, new: object, n: int = 0) -> Edit:
    """The n-th literal that is `old`, of the same type, becomes `new`."""

    def apply(root: ast.AST) -> None:
        found = [
            node
            for node in below(root)
            if isinstance(node, ast.Constant) and type(node.value) is type(old) and node.value == old
        ]
        _at(found, n, f"constant {old!r}").value = new  # type: ignore[assignment]

    return Edit(f"constant {old!r} -> {new!r} [{n}]", apply)


def called(old: str, new: str, n: int = 0) -> Edit:
    """The n-th call of a function or method `old` calls `new` instead: `max` for `min`."""

    def apply(root: ast.AST) -> None:
        function = _at(list(_calls(root, old)), n, f"call of {old}").func
        if isinstance(function, ast.Name):
            function.id = new
        elif isinstance(function, ast.Attribute):
            function.attr = new

    return Edit(f"call {old} -> {new} [{n}]", apply)


def only(name: str, argument: int, n: int = 0) -> Edit:
    """The n-th call of `name` becomes one of its arguments: what it did is lost."""

    def apply(root: ast.AST) -> None:
        call = _at(list(_calls(root, name)), n, f"call of {name}")
        _replace(root, call, _at(call.args, argument, f"argument of {name}"))

    return Edit(f"call {name}(...) -> argument {argument} [{n}]", apply)


def receiver(name: str, n: int = 0) -> Edit:
    """The n-th call of a method `name` becomes what it was called on: `row.clone()` becomes `row`."""

    def apply(root: ast.AST) -> None:
        found = [call for call in _calls(root, name) if isinstance(call.func, ast.Attribute)]
        call = _at(found, n, f"method {name}")
        assert isinstance(call.func, ast.Attribute)
        _replace(root, call, call.func.value)

    return Edit(f"method .{name}() lost [{n}]", apply)


def drop(kind: str, n: int = 0) -> Edit:
    """The n-th statement of a kind (see `STATEMENTS`) does nothing; a docstring is no statement."""

    def apply(root: ast.AST) -> None:
        found = [
            node
            for node in below(root)
            if isinstance(node, STATEMENTS[kind])
            and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        ]
        _replace(root, _at(found, n, f"statement {kind}"), ast.Pass())

    return Edit(f"drop {kind} [{n}]", apply)


def negate(n: int = 0) -> Edit:
    """The n-th condition (`if`, `while`, `a if b else c`) is the opposite."""

    def apply(root: ast.AST) -> None:
        node = _at(list(_conditions(root)), n, "condition")
        node.test = ast.UnaryOp(ast.Not(), node.test)

    return Edit(f"negate [{n}]", apply)


def decide(value: bool, n: int = 0) -> Edit:
    """The n-th condition is always or never so."""

    def apply(root: ast.AST) -> None:
        _at(list(_conditions(root)), n, "condition").test = ast.Constant(value)

    return Edit(f"condition -> {value} [{n}]", apply)


def boolean(old: str, new: str, n: int = 0) -> Edit:
    """The n-th `and` becomes `or`, or the other way round."""
    kinds: dict[str, type[ast.boolop]] = {"and": ast.And, "or": ast.Or}

    def apply(root: ast.AST) -> None:
        found = [
            node for node in below(root) if isinstance(node, ast.BoolOp) and isinstance(node.op, kinds[old])
        ]
        _at(found, n, old).op = kinds[new]()

    return Edit(f"{old} -> {new} [{n}]", apply)


def operand(old: str, keep: int, n: int = 0) -> Edit:
    """Of the n-th `and` or `or` only one operand is left."""
    kind = {"and": ast.And, "or": ast.Or}[old]

    def apply(root: ast.AST) -> None:
        found = [node for node in below(root) if isinstance(node, ast.BoolOp) and isinstance(node.op, kind)]
        node = _at(found, n, old)
        _replace(root, node, _at(node.values, keep, f"operand of {old}"))

    return Edit(f"of {old} only operand {keep} [{n}]", apply)


def side(old: str, keep: str, n: int = 0) -> Edit:
    """Of the n-th `old` between two numbers only the left or the right one is left: a lost division."""

    def apply(root: ast.AST) -> None:
        found = [
            node
            for node in below(root)
            if isinstance(node, ast.BinOp) and isinstance(node.op, OPERATORS[old])
        ]
        node = _at(found, n, f"operator {old}")
        _replace(root, node, node.left if keep == "left" else node.right)

    return Edit(f"of {old} only the {keep} [{n}]", apply)


def returns(source: str, n: int = 0) -> Edit:
    """The n-th `return` returns this expression."""

    def apply(root: ast.AST) -> None:
        found = [node for node in below(root) if isinstance(node, ast.Return)]
        _at(found, n, "return").value = ast.parse(source, mode="eval").body

    return Edit(f"return {source} [{n}]", apply)


def _calls(root: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in below(root):
        if isinstance(node, ast.Call):
            function = node.func
            if (isinstance(function, ast.Name) and function.id == name) or (
                isinstance(function, ast.Attribute) and function.attr == name
            ):
                yield node


def _conditions(root: ast.AST) -> Iterator[ast.If | ast.IfExp | ast.While]:
    for node in below(root):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node


def _at(found: list[T], n: int, what: str) -> T:
    if n >= len(found):
        raise EditError(f"{what}: number {n} is wanted, {len(found)} are there")
    return found[n]


def _replace(root: ast.AST, old: ast.AST, new: ast.AST) -> None:
    """Put a node in the place of another."""
    for parent in (root, *below(root)):
        for field, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, field, new)
                return
            if isinstance(value, list) and any(each is old for each in value):
                value[[each is old for each in value].index(True)] = new
                return
    raise EditError("the node has no parent")
