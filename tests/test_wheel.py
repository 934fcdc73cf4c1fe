"""The wheel: what it installs works by itself, with the studies in it and without the repository."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import ROOT, Answer, called

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with nothing in it but the wheel; dependencies are those that are installed here.

    A line of a .pth file adds a folder to the path without reading the .pth files inside it, so the editable
    installation of this repository is not seen.
    """
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = called([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT], folder)
    assert build.code == 0, build.err
    (wheel,) = folder.glob("manyhands-*.whl")
    environment = folder / "environment"
    made = called([sys.executable, "-m", "venv", "--without-pip", environment], folder)
    assert made.code == 0, made.err
    python = environment / "bin/python"
    install = called([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], folder)
    assert install.code == 0, install.err
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Callable[..., Answer]:
    """Call a program of that environment in an empty folder."""
    return lambda program, *words: called([installed / "bin" / program, *words], tmp_path, PYTHONPATH="")


def test_it_is_the_wheel_that_runs(run: Callable[..., Answer], installed: Path) -> None:
    answer = run("python", "-c", "import manyhands; print(manyhands.__file__)")
    assert Path(answer.out.strip()).is_relative_to(installed), answer.err
    assert (Path(answer.out.strip()).parent / "testing/transports.py").is_file(), "the suites are shipped"


def test_the_command_works(run: Callable[..., Answer], tmp_path: Path) -> None:
    answer = run("manyhands", "--help")
    assert answer.code == 0, answer.err
    assert "train" in answer.out
    answer = run("manyhands", "train", "digits-mlp", "--epochs", "1", "--threads", "1", "--quiet")
    assert answer.code == 0, answer.err
    answer = run("manyhands", "report", "runs")
    assert answer.code == 0, answer.err
    assert (tmp_path / "runs/report.html").is_file()


def test_its_studies_are_found_by_name(run: Callable[..., Answer], installed: Path) -> None:
    answer = run("manyhands", "study", "default", "--dry-run")
    assert answer.code == 0, answer.err
    assert "mnist-mlp" in answer.out
    shipped = {path.name for path in installed.glob("lib/python*/site-packages/manyhands/study/files/*.toml")}
    assert shipped == {path.name for path in (ROOT / "studies").glob("*.toml")}
