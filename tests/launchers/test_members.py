"""Every launcher passes the conformance suite: one class each."""

from __future__ import annotations

import pytest

from manyhands.errors import UsageError
from manyhands.launchers.base import Launcher
from manyhands.launchers.inline import Inline
from manyhands.testing.launchers import LauncherSuite, add_rank


class TestInline(LauncherSuite):
    def launcher(self) -> Launcher:
        return Inline()

    def test_it_runs_one_worker(self) -> None:
        with pytest.raises(UsageError, match=r"^the inline launcher runs 1 worker, not 2$"):
            Inline().launch(add_rank, 2, 0)
