"""The pages are true: their commands run, the modules and tests that they name exist."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import ROOT
from manyhands import cli
from manyhands.tasks import digits, find
from manyhands.tasks.base import Defaults

NAMES = ("allreduce", "average", "server", "hogwild", "pipeline", "sharded", "offload")
STRATEGIES = tuple(f"docs/strategies/{name}.md" for name in NAMES)
PAGES = ("README.md", "docs/guide.md", "docs/bring-your-own.md", *STRATEGIES)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to run the blocks in, with what they refer to."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("examples", "studies"):
        (folder / name).symlink_to(ROOT / name)
    return folder


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
    """`manyhands` runs in this process: importing torch forty times proves nothing."""
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


INSIDE = ("README.md", "CONTRIBUTING.md", *(f"docs/{name}.md" for name in ("design", "second-look", "lab")))
FOLDERS = ("src", "tests", "soak", "benchmarks", "tools", "examples")


@pytest.mark.parametrize("page", [*INSIDE, "docs/claims.md", "benchmarks/README.md", *STRATEGIES])
def test_modules_and_tests_that_a_page_names_exist(page: str) -> None:
    """`engine/loop.py` is a file of the repository, and so is the test of `tests/x.py::test_y`.

    Links and anchors are checked by the strict build of the site (tests/browser/test_site.py).
    """
    text = (ROOT / page).read_text()
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    named = set(re.findall(r"`((?:[\w*-]+/)*[\w*-]+\.py)(?:::\w|`)", text))
    assert sorted(name for name in named if "NAME" not in name and not any(map(_ends(name), files))) == []
    tests = {name.rpartition(":")[2] for name in re.findall(r"::([\w:]+)`", text)}
    known = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py")) if tests else ""
    assert sorted(name for name in tests if f"def {name}(" not in known) == []


def _ends(name: str) -> Callable[[Path], bool]:
    return lambda path: path.match(f"*/{name}")


def test_the_example_in_the_readme_has_four_lines() -> None:
    (code,) = blocks("README.md", "python")
    assert len(code.splitlines()) == 4


def test_the_guide_lists_every_task() -> None:
    from manyhands.tasks import TASKS

    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", (ROOT / "docs/guide.md").read_text(), re.MULTILINE)
    assert rows == list(TASKS)
