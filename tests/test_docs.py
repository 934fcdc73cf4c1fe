"""README and guide are true: their commands run, their paths exist."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import ROOT
from manyhands import cli
from manyhands.tasks import digits, find
from manyhands.tasks.base import Defaults

NAMES = ("allreduce", "average", "server", "hogwild", "pipeline", "sharded", "offload")
STRATEGIES = tuple(f"docs/strategies/{name}.md" for name in NAMES)
PAGES = ("README.md", "docs/guide.md", *STRATEGIES)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to run them in, with what they refer to."""
    place = tmp_path_factory.mktemp("docs")
    for name in ("examples", "studies"):
        (place / name).symlink_to(ROOT / name)
    return place


@pytest.fixture
def _short(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, one_core: None) -> Iterator[None]:
    """Seven epochs where nothing is said, not twenty (no line that goes on asks for more), and one thread.

    One epoch with several workers: on shared cores every step waits for each of them.
    """
    (text,) = request.node.callspec.params.values()
    epochs = 1 if "workers" in text else 7
    monkeypatch.setattr(digits, "Defaults", lambda **given: Defaults(**{**given, "epochs": epochs}))
    find._build.cache_clear()
    yield
    find._build.cache_clear()


LINES = [line for page in PAGES for block in blocks(page, "sh") for line in block.splitlines() if line]


@pytest.mark.slow
@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("line", dict.fromkeys(LINES))
def test_commands_run(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`manyhands` in this process, as its entry point does it: importing torch forty times proves nothing."""
    if line.startswith("make "):
        assert re.search(rf"^{line.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    program, *words = line.split()
    if program == "manyhands":
        monkeypatch.chdir(folder)
        assert cli.answer(words) == 0
        return
    assert program == "torchrun"
    words = [sys.executable, "-m", "torch.distributed.run", *words]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", [block for page in PAGES for block in blocks(page, "python")])
@pytest.mark.usefixtures("_short")
def test_python_runs(
    code: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a script, in this process."""
    monkeypatch.chdir(folder)
    (folder / "block.py").write_text(code)
    runpy.run_path("block.py", run_name="__main__")
    assert capsys.readouterr().out


def test_the_tree_of_the_readme_exists() -> None:
    (tree,) = re.findall(r"^```\n(src.*?)```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    inside = Path()
    for line in tree.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            inside = Path(name)
        path = inside / name if line.startswith(" ") else inside
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    "page",
    [
        *PAGES,
        "CONTRIBUTING.md",
        "docs/design.md",
        "docs/faults.md",
        "docs/claims.md",
        "docs/security.md",
        "benchmarks/README.md",
    ],
)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        if not target.startswith("http"):
            assert (ROOT / page).parent.joinpath(target).exists(), target


def test_the_example_in_the_readme_has_four_lines() -> None:
    (code,) = blocks("README.md", "python")
    assert len(code.splitlines()) == 4


def test_the_guide_lists_every_task() -> None:
    from manyhands.tasks import TASKS

    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", (ROOT / "docs/guide.md").read_text(), re.MULTILINE)
    assert rows == list(TASKS)
