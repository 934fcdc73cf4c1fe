"""The roles of asynchronous ranks: each rank has those it needs, and no method that only raises."""

from __future__ import annotations

import ast
from pathlib import Path

import manyhands.strategies
from manyhands.strategies.asynchronous.base import AsyncWorker, ParameterServer, QueueOwner
from manyhands.strategies.asynchronous.hogwild import Hogwild
from manyhands.strategies.asynchronous.parameter_client import Client
from manyhands.strategies.asynchronous.parameter_server import QueueServer, SliceServer

ROLES = (AsyncWorker, ParameterServer, QueueOwner)


def roles(kind: type) -> list[type]:
    return [role for role in ROLES if issubclass(kind, role)]


def test_each_rank_has_the_roles_it_needs() -> None:
    assert roles(Hogwild) == [AsyncWorker, QueueOwner]  # all share the queue, and rank 0 trains too
    assert roles(Client) == [AsyncWorker]
    assert roles(SliceServer) == [ParameterServer]
    assert roles(QueueServer) == [ParameterServer, QueueOwner]


def test_no_method_of_a_strategy_only_raises() -> None:
    found = []
    for path in Path(manyhands.strategies.__file__).parent.rglob("*.py"):
        for kind in ast.walk(ast.parse(path.read_text())):
            for method in kind.body if isinstance(kind, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef):
                    body = [each for each in method.body if not isinstance(each, ast.Expr)]
                    if body and all(isinstance(each, ast.Raise) for each in body):
                        found.append(f"{path.name}: {method.name}")
    assert found == []
