"""Every launcher passes the conformance suite: one class each."""

from __future__ import annotations

import pytest

from manyhands.errors import UsageError
from manyhands.launchers import env
from manyhands.launchers.base import Launcher
from manyhands.launchers.env import Env
from manyhands.launchers.inline import Inline
from manyhands.launchers.local import Local
from manyhands.launchers.mpi import Mpi
from manyhands.testing.deeds import add_rank
from manyhands.testing.launchers import GangSuite, LauncherSuite


class TestInline(LauncherSuite):
    def launcher(self) -> Launcher:
        return Inline()

    def test_it_runs_one_worker(self) -> None:
        with pytest.raises(UsageError, match=r"^the inline launcher runs 1 worker, not 2$"):
            Inline().launch(add_rank, 2, 0)


class TestLocal(GangSuite):
    def launcher(self) -> Launcher:
        return Local(preload=["manyhands.testing.deeds"])


class TestMpi(GangSuite):
    sizes = (1, 2)

    def launcher(self) -> Launcher:
        return Mpi()


class TestEnvAlone(LauncherSuite):
    """One process that torchrun started; several are in test_env.py."""

    @pytest.fixture(autouse=True)
    def _torchrun(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        for name, value in found.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(env, "_leading", None)

    def launcher(self) -> Launcher:
        return Env()
