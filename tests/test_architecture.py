"""The import arrows, checked by a tool; and the sizes that say two ideas share a room."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

SOURCES = sorted((ROOT / "src/manyhands").rglob("*.py"))


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


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src/manyhands")))
def test_one_idea_a_module(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400
    first = ast.get_docstring(ast.parse(text))
    assert first, "its first line says what it is about"
    assert "\n" not in first.split("\n\n")[0]


def test_no_registry_is_named() -> None:
    hosts = ["pypi" + ".org", "registry.npm" + "js", "deb." + "debian", "files.python" + "hosted"]
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).suffix in {".py", ".md", ".toml", ".txt", ""} and (ROOT / name).is_file():
            text = (ROOT / name).read_text(errors="ignore")
            assert not [host for host in hosts if host in text], name
