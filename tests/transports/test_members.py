"""Every transport passes the conformance suite: one class each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from manyhands.errors import UsageError
from manyhands.testing.transports import TransportSuite
from manyhands.transports.base import Transport
from manyhands.transports.solo import Solo


class TestSolo(TransportSuite):
    def gang(self, size: int, function: Callable[[Transport], Any]) -> list[Any]:
        return [function(Solo())]

    def test_there_is_nobody_else(self) -> None:
        alone = r"^the solo transport has one rank: "
        with pytest.raises(UsageError, match=alone + r"nothing can be sent to rank 1$"):
            Solo().send(torch.zeros(1), 1)
        with pytest.raises(UsageError, match=alone + r"nothing can come from rank 1$"):
            Solo().recv(torch.zeros(1), 1)
        with pytest.raises(UsageError, match=alone + r"there is no rank 1$"):
            Solo().broadcast(torch.zeros(1), 1)
