"""The random generators that a task's code may use: torch's on the CPU, numpy's and Python's own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class RandomStates(NamedTuple):
    """Their states at one moment."""

    torch: Tensor
    numpy: dict[str, Any]
    python: tuple[Any, ...]

    @classmethod
    def now(cls) -> RandomStates:
        """The states of this moment."""
        return cls(torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate())

    @property
    def unchanged(self) -> bool:
        """Whether no number was drawn since then."""
        now = RandomStates.now()
        mine, theirs = self.numpy["state"], now.numpy["state"]
        return (
            bool(torch.equal(self.torch, now.torch))
            and self.python == now.python
            and mine["pos"] == theirs["pos"]
            and bool((mine["key"] == theirs["key"]).all())
            and self.numpy["has_gauss"] == now.numpy["has_gauss"]
        )

    def restore(self) -> None:
        """Continue from these states."""
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


def seed(number: int) -> None:
    """Seed all of them."""
    torch.default_generator.manual_seed(number % 2**63)
    np.random.seed(number % 2**32)
    random.seed(number)


@contextmanager
def kept() -> Iterator[None]:
    """Restore their states afterwards."""
    before = RandomStates.now()
    try:
        yield
    finally:
        before.restore()
