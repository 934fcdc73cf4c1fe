"""The import arrows, checked by a tool; and the sizes that say two ideas share a room."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from conftest import ROOT

SOURCES = sorted((ROOT / "src/manyhands").rglob("*.py"))


def test_the_import_arrows_hold() -> None:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_the_arrows_can_break(tmp_path: object) -> None:
    """A check that cannot fail is none: the contracts name modules that exist."""
    text = (ROOT / "pyproject.toml").read_text()
    assert text.count("[[tool.importlinter.contracts]]") >= 6


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src/manyhands")))
def test_one_idea_a_module(path: object) -> None:
    text = path.read_text()  # type: ignore[attr-defined]
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
