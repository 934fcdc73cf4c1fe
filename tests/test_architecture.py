"""The import arrows, names that mean one thing, and what is known of a member written once, in its row."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from conftest import ROOT
from manyhands.core.registry.launchers import LAUNCHERS
from manyhands.core.registry.strategies import STRATEGIES
from manyhands.core.registry.transports import TRANSPORTS
from manyhands.records.spec import RunSpec

PACKAGE = ROOT / "src/manyhands"
SOURCES = sorted(PACKAGE.rglob("*.py"))
ROOMS = {"strategies": STRATEGIES, "transports": TRANSPORTS, "launchers": LAUNCHERS}
MEMBERS = {f"{room}:{name}" for room, members in ROOMS.items() for name in members}
NAMES = {name for members in ROOMS.values() for name in members}
AMBIGUOUS = {*RunSpec.model_fields, "torch"}
# a room may name its own members, and the registry all of them
OUTSIDE = [
    path
    for path in SOURCES
    if path.relative_to(PACKAGE).parts[0] not in ROOMS and not path.is_relative_to(PACKAGE / "core/registry")
]


def lint_imports(cwd: Path, path: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_import_arrows_hold() -> None:
    done = lint_imports(ROOT, ROOT / "src")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("records/record.py", "import torch"),
        ("launchers/inline.py", "from manyhands.strategies import single"),
        ("engine/loop.py", "from manyhands.strategies.single import Single"),
        ("data/order.py", "from manyhands import runs"),
        ("study/grid.py", "import manyhands.testing.tasks"),
    ],
)
def test_an_arrow_the_wrong_way_is_seen(tmp_path: Path, module: str, line: str) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / "src/manyhands" / module
    path.write_text(path.read_text() + f"\n{line}\n")
    done = lint_imports(tmp_path, tmp_path / "src")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"[1-9] broken", done.stdout)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_one_idea_a_module(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400
    first = ast.get_docstring(ast.parse(text))
    assert first, "its first line says what it is about"
    assert "\n" not in first.split("\n\n")[0]


def literal_names(path: Path) -> list[str]:
    """Where a module compares something with the name of a strategy, transport or launcher, or looks it up.

    `threads` is a setting too and `torch` a package: these count where the axis is spoken of.
    """
    axes = {"strategy": STRATEGIES, "transport": TRANSPORTS, "launcher": LAUNCHERS}
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        text = ast.unparse(node) if isinstance(node, ast.expr | ast.pattern) else ""
        for axis, members in axes.items():
            names = {name for name in members if name not in AMBIGUOUS or axis in text}
            found += [f"{node.lineno}: {text}" for _ in names & _compared(node)]  # type: ignore[attr-defined]
    return found


def _compared(node: ast.AST) -> set[str]:
    """The texts that something is compared with: by an operator, a pattern, the keys of a table, a list."""
    if isinstance(node, ast.Compare):
        return _texts(node.left, *node.comparators)
    if isinstance(node, ast.MatchValue):
        return _texts(node.value)
    if isinstance(node, ast.Dict):
        keys = _texts(*filter(None, node.keys))
        return keys if keys <= NAMES else keys - AMBIGUOUS
    if isinstance(node, ast.Tuple | ast.List | ast.Set):  # which a comparison may use by its name
        texts = _texts(*node.elts)
        return texts if len(texts) == len(node.elts) and texts <= NAMES else set()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
        return _texts(*node.args)
    return set()


def _texts(*nodes: ast.expr) -> set[str]:
    inner = [each for node in nodes for each in getattr(node, "elts", [node])]
    return {node.value for node in inner if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_is_known_of_a_member_is_in_its_row(path: Path) -> None:
    """One file, one row: a new strategy, transport or launcher needs no change in another room."""
    assert literal_names(path) == []


@pytest.mark.parametrize(
    "line",
    [
        "spec.strategy == 'single'",
        "'pipeline' != strategy",
        "name in ('layers', 'pipeline')",
        "row.variant.split()[0] not in {'server'}",
        "{'inline': 0.3, 'local': 1.5}.get(spec.launcher, 2.0)",
        "STAGED = ('layers', 'pipeline')",
        "spec.transport == 'torch'",
        "variant.startswith('single')",
        "match spec.launcher:\n    case 'env':\n        pass",
    ],
)
def test_a_literal_name_is_seen(tmp_path: Path, line: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(line)
    assert literal_names(path)


def test_no_class_name_means_two_things() -> None:
    found: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def meaning(path: Path) -> str:
    """What the name of a file means: the same where the folders give it the same sense."""
    folder, name = str(path.parent.relative_to(PACKAGE)), path.stem
    if name in ("__init__", "base"):  # of their room
        return "of its room"
    if folder in ("report/charts", "analysis"):
        return "a chart, and the numbers that it draws"
    if folder in ("cli", "runs"):
        return "a verb, and what it calls"
    if folder in ("testing", "core/registry"):
        return "an axis: its rows, and its conformance suite"
    if f"{folder.split('/')[0]}:{name}" in MEMBERS:
        return "a member of an axis"
    if name == "worker" and folder.startswith("strategies/"):
        return "the worker of a strategy"
    return folder


def test_no_file_name_means_two_things() -> None:
    found: dict[str, dict[str, str]] = {}
    for path in SOURCES:
        found.setdefault(path.stem, {})[meaning(path)] = str(path.relative_to(PACKAGE))
    assert {name: senses for name, senses in found.items() if len(senses) > 1} == {}


def test_every_room_is_in_a_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    towers = [each for each in contracts if each.get("containers") == ["manyhands"]]
    layers = [layer for each in towers for layer in each["layers"]]
    named = {room.strip() for layer in layers for room in layer.split("|")}
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms - {"testing"} == named  # what may not be imported at all has a contract of its own
    forbidden = {each for contract in contracts for each in contract.get("forbidden_modules", [])}
    assert "manyhands.testing" in forbidden
    loose = {path.name for path in PACKAGE.glob("*.py")}
    assert loose == {"__init__.py", "__main__.py"}


def test_rooms_form_no_cycle() -> None:
    tool = ROOT / "tools/room_edges.py"
    done = subprocess.run([sys.executable, str(tool)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "cycles: none"


def test_no_registry_is_named() -> None:
    hosts = ["pypi" + ".org", "registry.npm" + "js", "deb." + "debian", "files.python" + "hosted"]
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).suffix in {".py", ".md", ".toml", ".txt", ""} and (ROOT / name).is_file():
            text = (ROOT / name).read_text(errors="ignore")
            assert not [host for host in hosts if host in text], name
