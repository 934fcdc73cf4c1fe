"""Schedules against tables drawn by hand, and what holds for every number of stages and micro-batches."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.strategies.pipeline.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    gpipe,
    ideal_speedup,
    idle_share,
    in_flight,
    one_forward_one_backward,
)


class Span(NamedTuple):
    """An action in time."""

    action: Action
    begin: int
    end: int


def timeline(
    schedule: Schedule, stages: int, micro_batches: int, forward: int = 1, backward: int = 2
) -> list[list[Span]]:
    """When each stage does what, if sending takes no time."""
    plans = [list(schedule(stage, stages, micro_batches)) for stage in range(stages)]
    done: dict[tuple[int, Action], int] = {}
    spans: list[list[Span]] = [[] for _ in range(stages)]
    now = [0] * stages
    while any(len(spans[stage]) < len(plans[stage]) for stage in range(stages)):
        moved = False
        for stage in range(stages):
            while len(spans[stage]) < len(plans[stage]):
                action = plans[stage][len(spans[stage])]
                before = stage - 1 if action.kind == "forward" else stage + 1
                if 0 <= before < stages and (before, action) not in done:
                    break
                begin = max(now[stage], done.get((before, action), 0))
                end = begin + (forward if action.kind == "forward" else backward)
                spans[stage].append(Span(action, begin, end))
                done[stage, action], now[stage], moved = end, end, True
        assert moved, f"{schedule.__name__} waits for itself at {stages} x {micro_batches}"
    return spans


# A forward and a backward take one unit of time each, sending takes none.
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
def test_no_stage_uses_a_tensor_before_it_exists(name: str, stages: int, micro_batches: int) -> None:
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
