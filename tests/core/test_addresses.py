"""By which address others reach this host, and sockets at one address only."""

from __future__ import annotations

import pytest

from manyhands.core import addresses
from manyhands.core.errors import UsageError


def test_the_way_to_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert addresses.source("127.0.0.1") == "127.0.0.1"
    with pytest.raises(UsageError, match=r"^there is no route from this host to 127.0.0.2: set MASTER_ADDR"):
        addresses.outward(["127.0.0.2"])
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.9")
    assert addresses.outward(["127.0.0.2"]) == "10.0.0.9"
    with pytest.raises(OSError, match=r"^:: means every address of this host: give one address$"):
        addresses.listener("::", 0)
