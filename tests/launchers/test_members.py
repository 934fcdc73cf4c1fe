"""Every launcher passes the conformance suite: one class each."""

from __future__ import annotations

import pytest

from manyhands.core.errors import UsageError
from manyhands.launchers.base import Launcher
from manyhands.launchers.env import launcher
from manyhands.launchers.env.launcher import EnvLauncher
from manyhands.launchers.inline import InlineLauncher
from manyhands.launchers.local import LocalLauncher
from manyhands.launchers.mpi import MpiLauncher
from manyhands.testing.launchers import LauncherSuite, WorkerGroupSuite
from manyhands.testing.worker_functions import add_rank


class TestInline(LauncherSuite):
    def launcher(self) -> Launcher:
        return InlineLauncher()

    def test_it_runs_one_worker(self) -> None:
        with pytest.raises(UsageError, match=r"^the inline launcher runs 1 worker, not 2$"):
            InlineLauncher().launch(add_rank, 2, 0)


class TestLocal(WorkerGroupSuite):
    def launcher(self) -> Launcher:
        return LocalLauncher(preload=["manyhands.testing.worker_functions"])


class TestMpi(WorkerGroupSuite):
    sizes = (1, 2)

    def launcher(self) -> Launcher:
        return MpiLauncher()


class TestEnvAlone(LauncherSuite):
    """One process that torchrun started; several are in test_env.py."""

    @pytest.fixture(autouse=True)
    def _torchrun(self, monkeypatch: pytest.MonkeyPatch) -> None:
        variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(launcher, "_the_leader", None)

    def launcher(self) -> Launcher:
        return EnvLauncher()
