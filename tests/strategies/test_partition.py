"""The cut: exact against brute force, what it says, and what cannot be cut."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core.errors import UsageError
from manyhands.offload.blocks import Cost
from manyhands.strategies.pipeline.partition import balanced, describe, stages_of, to_record


def stage_times(seconds: list[float], cuts: tuple[int, ...], transfer: list[float]) -> list[float]:
    """What each stage takes: its blocks, and transfer on at both of its ends."""
    count = len(seconds)
    return [
        sum(seconds[first:end])
        + (transfer[first - 1] if first else 0)
        + (transfer[end - 1] if end < count else 0)
        for first, end in pairwise((0, *cuts, count))
    ]


def every_cut(count: int, stages: int, forbidden: set[int]) -> list[tuple[int, ...]]:
    return list(combinations([border for border in range(1, count) if border not in forbidden], stages - 1))


# whole numbers, so that sums are exact and ties are ties
@given(
    seconds=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    stages=st.integers(1, 5),
    transfer=st.lists(st.integers(0, 4), min_size=8, max_size=8),
    forbidden=st.sets(st.integers(0, 8), max_size=4),
)
def test_no_cut_is_better(seconds: list[int], stages: int, transfer: list[int], forbidden: set[int]) -> None:
    """Of all cuts the slowest stage is the fastest; of two stages the other one is as fast as can be, too."""
    times, costs = [float(each) for each in seconds], [float(each) for each in transfer[: len(seconds)]]
    possible = every_cut(len(times), stages, forbidden)
    if not possible:
        with pytest.raises(UsageError, match=rf"blocks? cannot be cut into {stages} stages"):
            balanced(times, stages, transfer=costs, forbidden=forbidden)
        return

    def rank(cuts: tuple[int, ...]) -> tuple[float, float]:
        parts = stage_times(times, cuts, costs)
        return max(parts), sum(part**2 for part in parts)

    found = balanced(times, stages, transfer=costs, forbidden=forbidden)
    assert found in possible
    assert rank(found)[0] == min(rank(cuts)[0] for cuts in possible)
    if stages == 2:
        assert rank(found) == min(rank(cuts) for cuts in possible)


@pytest.mark.parametrize(
    ("seconds", "stages", "cuts"),
    [
        ([1, 1, 1, 1], 1, ()),
        ([1, 1, 1, 1], 2, (2,)),
        ([1, 1, 1, 1], 4, (1, 2, 3)),
        ([3, 1, 1, 1], 2, (1,)),
        ([1, 1, 1, 5], 2, (3,)),
        ([9, 1, 1, 1, 1], 3, (1, 3)),  # the first stage is the slowest in any case: the others are even
        ([1, 1, 1], 2, (1,)),  # equally good either way: always the same one
        ([0, 0, 0], 2, (1,)),
    ],
)
def test_cuts_that_can_be_seen(seconds: list[float], stages: int, cuts: tuple[int, ...]) -> None:
    assert balanced(seconds, stages) == cuts


def test_handing_on_much_is_avoided() -> None:
    """An even cut would hand on what takes longer than computing it."""
    assert balanced([2.0, 2.0, 2.0, 2.0], 2) == (2,)
    assert balanced([2.0, 2.0, 2.0, 2.0], 2, transfer=[0.1, 9.0, 0.1, 0.0]) == (1,)


@pytest.mark.parametrize(
    ("count", "stages", "forbidden", "sentence"),
    [
        (3, 4, (), "3 blocks cannot be cut into 4 stages"),
        (1, 2, (), "1 block cannot be cut into 2 stages"),
        (
            2,
            2,
            (1,),
            "2 blocks cannot be cut into 2 stages: none can begin at block 1 (shared parameters, or inputs "
            "changed in place)",
        ),
        (
            4,
            3,
            (0, 1, 3),  # 0 is no border
            "4 blocks cannot be cut into 3 stages: none can begin at blocks 1, 3 (shared parameters, or "
            "inputs changed in place)",
        ),
    ],
)
def test_what_cannot_be_cut(count: int, stages: int, forbidden: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        balanced([1.0] * count, stages, forbidden=forbidden)
    assert str(caught.value) == sentence


COSTS = [
    Cost("0 Linear", 1.0, 2.0, 100, 4000, 0.1, 1200, True),
    Cost("1 ReLU", 0.5, 0.5, 200, 4000, 0.1, 0, True),
    Cost("2 Linear", 2.0, 2.0, 300, 40, 0.1, 1, True),
]


def test_a_cut_in_one_line() -> None:
    assert describe(stages_of(COSTS, (2,))) == (
        "cut: blocks 0-1 (50 % of the time, 1,200 parameters, sends 4 KB) | 2 (50 %, 1 parameter)"
    )
    assert describe(stages_of(COSTS, ())) == "cut: blocks 0-2 (100 % of the time, 1,201 parameters)"


def test_stages_add_up() -> None:
    assert to_record(stages_of(COSTS, (1, 2))) == [
        {"first": 0, "end": 1, "seconds": 3.0, "saved": 100, "outputs": 4000, "parameters": 1200},
        {"first": 1, "end": 2, "seconds": 1.0, "saved": 200, "outputs": 4000, "parameters": 0},
        {"first": 2, "end": 3, "seconds": 4.0, "saved": 300, "outputs": 40, "parameters": 1},
    ]


def test_millions_of_parameters_are_written_out() -> None:
    many = [cost._replace(parameters=4_597_260) for cost in COSTS]
    assert "4,597,260 parameters" in describe(stages_of(many, (1, 2)))


def test_blocks_that_take_no_time_are_described_all_the_same() -> None:
    nothing = [cost._replace(forward=0.0, backward=0.0) for cost in COSTS]
    assert describe(stages_of(nothing, (1,))).startswith("cut: blocks 0 (0 % of the time, ")
