"""Schedules against tables drawn by hand, and what holds for every number of stages and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.strategies.pipeline import schedule
from manyhands.strategies.pipeline.schedule import (
    SCHEDULES,
    Action,
    drawn,
    gpipe,
    ideal_speedup,
    idle_share,
    in_flight,
    one_forward_one_backward,
    timeline,
)

# A forward and a backward take one unit of time each, handing over takes none.
TABLES = {
    ("gpipe", 2, 4): """
        F0 F1 F2 F3 .  .  B0 B1 B2 B3
        .  F0 F1 F2 F3 B0 B1 B2 B3 .
        """,
    ("1f1b", 2, 4): """
        F0 F1 .  B0 F2 B1 F3 B2 .  B3
        .  F0 B0 F1 B1 F2 B2 F3 B3 .
        """,
    ("gpipe", 3, 4): """
        F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
        .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
        .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .
        """,
    ("1f1b", 3, 4): """
        F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
        """,
    ("gpipe", 4, 4): """
        F0 F1 F2 F3 .  .  .  .  .  .  B0 B1 B2 B3
        .  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3 .
        .  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .  .
        .  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .  .
        """,
    ("1f1b", 4, 4): """
        F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3
        .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .
        .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .
        .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .
        """,
    ("gpipe", 2, 1): """
        F0 .  .  B0
        .  F0 B0 .
        """,
    ("1f1b", 2, 1): """
        F0 .  .  B0
        .  F0 B0 .
        """,
    ("gpipe", 4, 2): """
        F0 F1 .  .  .  .  .  .  B0 B1
        .  F0 F1 .  .  .  .  B0 B1 .
        .  .  F0 F1 .  .  B0 B1 .  .
        .  .  .  F0 F1 B0 B1 .  .  .
        """,
    ("1f1b", 4, 2): """
        F0 F1 .  .  .  .  .  B0 .  B1
        .  F0 F1 .  .  .  B0 .  B1 .
        .  .  F0 F1 .  B0 .  B1 .  .
        .  .  .  F0 B0 F1 B1 .  .  .
        """,
}

names = st.sampled_from(sorted(SCHEDULES))
counts = st.integers(1, 9)


def rows(table: str) -> list[list[str]]:
    return [line.split() for line in table.strip().splitlines()]


@pytest.mark.parametrize(("name", "stages", "micro_batches"), TABLES)
def test_the_table_drawn_by_hand(name: str, stages: int, micro_batches: int) -> None:
    table = rows(TABLES[name, stages, micro_batches])
    for stage, row in enumerate(table):
        planned = [str(action) for action in SCHEDULES[name](stage, stages, micro_batches)]
        assert planned == [cell for cell in row if cell != "."]
    spans = timeline(SCHEDULES[name], stages, micro_batches, forward=1, backward=1)
    for line, row in zip(spans, table, strict=True):
        assert {span.begin: str(span.action) for span in line} == {
            at: cell for at, cell in enumerate(row) if cell != "."
        }


@given(name=names, stages=counts, micro_batches=st.integers(0, 9))
def test_each_micro_batch_goes_forward_once_and_then_backward_once(
    name: str, stages: int, micro_batches: int
) -> None:
    for stage in range(stages):
        plan = list(SCHEDULES[name](stage, stages, micro_batches))
        assert sorted(plan) == sorted(
            Action(kind, number) for kind in ("forward", "backward") for number in range(micro_batches)
        )
        for kind in ("forward", "backward"):  # in order: gradients are added up as one worker adds them
            assert [each.micro_batch for each in plan if each.kind == kind] == list(range(micro_batches))
        for number in range(micro_batches):
            assert plan.index(Action("forward", number)) < plan.index(Action("backward", number))


@given(
    name=names,
    stages=counts,
    micro_batches=counts,
    forward=st.integers(1, 4),
    backward=st.integers(1, 4),
)
def test_the_time_of_a_step(name: str, stages: int, micro_batches: int, forward: int, backward: int) -> None:
    """It never waits for itself, and is idle for just the time in which the pipeline fills and empties."""
    spans = timeline(SCHEDULES[name], stages, micro_batches, forward, backward)
    span = max(line[-1].end for line in spans)
    assert span == (micro_batches + stages - 1) * (forward + backward)
    for line in spans:
        busy = sum(each.end - each.begin for each in line)
        assert 1 - busy / span == pytest.approx(idle_share(stages, micro_batches))
    alone = stages * micro_batches * (forward + backward)  # every stage's work, by one worker
    assert alone / span == pytest.approx(ideal_speedup(stages, micro_batches))


@given(name=names, stages=counts, micro_batches=counts)
def test_nothing_is_used_before_it_is_there(name: str, stages: int, micro_batches: int) -> None:
    spans = timeline(SCHEDULES[name], stages, micro_batches)
    when = {(stage, span.action): span for stage, line in enumerate(spans) for span in line}
    for (stage, action), span in when.items():
        before = stage + (-1 if action.kind == "forward" else 1)
        if 0 <= before < stages:
            assert span.begin >= when[before, action].end
        if action.kind == "backward":
            assert span.begin >= when[stage, Action("forward", action.micro_batch)].end
    for line in spans:
        assert all(one.end <= other.begin for one, other in pairwise(line))


@given(stages=counts, micro_batches=counts)
def test_what_a_stage_holds(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        assert in_flight(gpipe, stage, stages, micro_batches) == micro_batches
        most = min(micro_batches, stages - stage)
        assert in_flight(one_forward_one_backward, stage, stages, micro_batches) == most


def test_nothing_to_do_holds_nothing() -> None:
    """A replica whose share of a ragged batch is empty."""
    assert [in_flight(each, 0, 3, 0) for each in SCHEDULES.values()] == [0, 0]


def test_a_schedule_that_waits_for_itself_is_noticed() -> None:
    def crossed(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
        """The last stage asks for a backward before its forward's inputs can have come."""
        order = ("forward", "backward") if stage else ("backward", "forward")
        yield from (Action(kind, 0) for kind in order)  # type: ignore[arg-type]

    with pytest.raises(AssertionError, match=r"^crossed waits for itself at 2 x 1$"):
        timeline(crossed, 2, 1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_picture_in_the_docstring(name: str) -> None:
    assert schedule.__doc__ is not None
    lines = [line.strip() for line in schedule.__doc__.splitlines()]
    heading = next(number for number, line in enumerate(lines) if line.startswith(f"{name} "))
    assert drawn(timeline(SCHEDULES[name], 2, 4)) == lines[heading + 2 : heading + 4]


def test_a_backward_as_long_as_a_forward_is_drawn_as_short() -> None:
    assert drawn(timeline(one_forward_one_backward, 3, 2, forward=1, backward=1)) == [
        "stage 0  F0 F1 .  .  .  B0 .  B1",
        "stage 1  .  F0 F1 .  B0 .  B1 .",
        "stage 2  .  .  F0 B0 F1 B1 .  .",
    ]
