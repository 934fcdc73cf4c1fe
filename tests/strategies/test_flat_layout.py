"""Flat memory: slices cover it without overlap, and the pieces of all slices are the whole tensor."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.strategies.flat_layout import ALIGNED, lay_out, slice_of

sizes = st.lists(st.integers(0, 70), min_size=1, max_size=6)
workers = st.integers(1, 5)


@given(sizes=sizes, workers=workers)
def test_slices_cover_flat_memory_and_end_at_cache_lines(sizes: list[int], workers: int) -> None:
    _, length = lay_out((str(number), torch.empty(size)) for number, size in enumerate(sizes))
    slices = [slice_of(length, index, workers) for index in range(workers)]
    covered = [element for part in slices for element in range(part.start, part.stop)]
    assert covered == list(range(length))
    assert all(part.start % ALIGNED == 0 for part in slices)
    lengths = [part.stop - part.start for part in slices]
    assert max(lengths) - min(lengths) <= ALIGNED


@given(sizes=sizes, workers=workers)
def test_each_element_of_a_parameter_is_within_one_slice(sizes: list[int], workers: int) -> None:
    slots, length = lay_out((str(number), torch.empty(size)) for number, size in enumerate(sizes))
    for slot in slots:
        parts = [slot.within(slice_of(length, index, workers)) for index in range(workers)]
        covered = [element for part in parts for element in range(part.start, part.stop)]
        assert covered == list(range(slot.start, slot.start + slot.parameter.numel()))


def test_pieces_are_in_the_order_of_memory() -> None:
    """Channels-last weights: a slice of the memory is not a slice of the indices."""
    weight = torch.empty(4, 3, 5, 2).to(memory_format=torch.channels_last)
    slots, length = lay_out([("before", torch.empty(7)), ("weight", weight)])
    whole = torch.arange(120.0).view(4, 3, 5, 2)  # contiguous, as in a checkpoint
    flat = torch.zeros(length)
    for index in range(3):
        part = slice_of(length, index, 3)
        flat[slots[1].within(part)] = slots[1].piece(part, whole)
    view = slots[1].view(flat)
    assert torch.equal(view, whole)
    assert view.stride() == weight.stride()
