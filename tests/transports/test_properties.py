"""Random tensors through all collectives, compared with the expected results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conftest import MORE
from manyhands.testing.transports import DTYPES
from manyhands.transports import tensor_bytes
from manyhands.transports.base import Transport
from manyhands.transports.shm.transport import ShmTransport
from manyhands.transports.threads import ThreadGroup
from transports.groups import processes

Case = tuple[torch.dtype, tuple[int, ...], int]

SHAPES = st.one_of(
    st.lists(st.integers(0, 6), max_size=4).map(tuple),
    st.tuples(st.integers(16_000, 17_000)),  # around the size above which each worker sums a slice
    st.tuples(st.integers(260_000, 530_000)),  # and around the size of a slot
)
CASES = st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES, st.integers(0, 2**31)), min_size=1, max_size=6)


def tensor_of(case: Case, rank: int) -> Tensor:
    dtype, shape, seed = case
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed + rank))
    return (4 * values).abs().to(dtype) if dtype == torch.uint8 else (4 * values).to(dtype)


def all_collectives(transport: Transport, cases: Sequence[Case]) -> None:
    size, rank = transport.size, transport.rank
    for number, case in enumerate(cases):
        everyone = [tensor_of(case, peer) for peer in range(size)]
        expected = tensor_bytes.add_in_order(everyone, torch.empty_like(everyone[0]))
        assert torch.equal(transport.all_reduce(everyone[rank].clone()), expected), case
        root = number % size
        assert torch.equal(transport.broadcast(everyone[rank].clone(), root), everyone[root]), case
        for part, theirs in zip(transport.all_gather(everyone[rank]), everyone, strict=True):
            assert torch.equal(part, theirs), case
        transport.send(everyone[rank][..., :1000] if case[1] else everyone[rank], (rank + 1) % size)
        before = everyone[rank - 1][..., :1000] if case[1] else everyone[rank - 1]
        assert torch.equal(transport.recv(torch.zeros_like(before), (rank - 1) % size), before), case


def threads(size: int, function: Callable[[Transport], Any]) -> list[Any]:
    return ThreadGroup(size, 30.0).run(function)


def shm(size: int, function: Callable[[Transport], Any]) -> list[Any]:
    return processes(partial(ShmTransport, timeout=30.0), ["here"] * size, function)


@pytest.mark.hypothesis
@pytest.mark.parametrize(
    ("run_group", "examples"), [(threads, 20 * MORE), (shm, 6 * MORE)], ids=["threads", "shm"]
)
def test_collectives_of_anything(run_group: Callable[..., list[Any]], examples: int) -> None:
    @settings(max_examples=examples)
    @given(size=st.integers(1, 4), cases=CASES)
    def holds(size: int, cases: list[Case]) -> None:
        assert run_group(size, partial(all_collectives, cases=cases)) == [None] * size

    holds()
