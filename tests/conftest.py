"""Shared by all tests: a folder of one's own, and the command line called as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

from manyhands import cli
from manyhands.core import environment

# Examples on a shared machine take as long as they take.
settings.register_profile("manyhands", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("manyhands")

ROOT = Path(__file__).parents[1]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # what mpirun wants to hear
SHARED = ROOT.parent / "shared"


# What watches deadlines, the host's shared memory or its speed must not run beside other tests.
ALONE = (
    "faults", "launchers", "transports", "test_benchmarks.py", "test_async_runs.py", "test_allocator.py",
    "test_offload_runs.py", "test_commands.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark those that `make test` runs one by one; the others share the cores."""
    for item in items:
        if any(part in ALONE for part in item.path.parts):
            item.add_marker("alone")


class Answer:
    """What a command line answered."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


def called(command: Sequence[str | Path], cwd: Path, **environment: str) -> Answer:
    """Run any command in a folder."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def manyhands(tmp_path: Path) -> Callable[..., Answer]:
    """Run `manyhands ...` in a child, in an empty folder."""

    def call(*words: str, cwd: Path = tmp_path, **environment: str) -> Answer:
        return called([sys.executable, "-m", "manyhands", *words], cwd, **environment)

    return call


@pytest.fixture(scope="session", autouse=True)
def _own_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs are signed with a key of these tests' own: nothing is written to the real home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Of torch, in this process, outside of runs: small tensors that several threads play with at once."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread where nothing is said: two wait long for each other where others work as well."""
    monkeypatch.setattr(environment, "cores", lambda: 1)


@pytest.fixture
def typed(tmp_path: Path, capsys: pytest.CaptureFixture[str], one_core: None) -> Callable[..., Answer]:
    """Run `manyhands ...` in this process, in an empty folder: a child imports torch for seconds."""

    def call(*words: str, cwd: Path = tmp_path, **environment: str) -> Answer:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(cwd)
            for name, value in environment.items():
                patch.setenv(name, value)
            capsys.readouterr()
            code = cli.answer(list(words))
        return Answer(code, *capsys.readouterr())

    return call


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
