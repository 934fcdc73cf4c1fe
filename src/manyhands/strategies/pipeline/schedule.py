"""Pipeline schedules as pure generators: what one stage does, in order; who executes it is somebody else.

Two stages, four micro-batches, a backward twice as long as a forward:

    gpipe   all forwards, then all backwards: every micro-batch is held at once

        stage 0  F0 F1 F2 F3 .  .  .  B0--- B1--- B2--- B3---
        stage 1  .  F0 F1 F2 F3 B0--- B1--- B2--- B3--- .  .

    1f1b    a backward as soon as there is one: a stage holds no more than there are stages from it on

        stage 0  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3---
        stage 1  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .

Both are idle for (stages - 1) / (micro-batches + stages - 1) of the time. Backwards go in the order of the
micro-batches, so gradients are added up in the order in which one worker would add them: the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple


class Action(NamedTuple):
    """Forward or backward of one micro-batch."""

    kind: Literal["forward", "backward"]
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.micro_batch}"


Schedule = Callable[[int, int, int], Iterator[Action]]


def gpipe(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """All forwards, then all backwards (Huang et al. 2018)."""
    yield from (Action("forward", number) for number in range(micro_batches))
    yield from (Action("backward", number) for number in range(micro_batches))


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """As many forwards as there are stages behind, then one of each in turn (PipeDream, Megatron)."""
    ahead = min(stages - stage - 1, micro_batches)
    yield from (Action("forward", number) for number in range(ahead))
    for number in range(micro_batches - ahead):
        yield Action("forward", ahead + number)
        yield Action("backward", number)
    yield from (Action("backward", number) for number in range(micro_batches - ahead, micro_batches))


SCHEDULES: Mapping[str, Schedule] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def in_flight(schedule: Schedule, stage: int, stages: int, micro_batches: int) -> int:
    """The most micro-batches that a stage holds at a time, between their forward and their backward."""
    held = most = 0
    for action in schedule(stage, stages, micro_batches):
        held += 1 if action.kind == "forward" else -1
        most = max(most, held)
    return most


def idle_share(stages: int, micro_batches: int) -> float:
    """The part of a step for which a stage has nothing to do, where all stages take the same time."""
    return (stages - 1) / (micro_batches + stages - 1)


def ideal_speedup(stages: int, micro_batches: int) -> float:
    """Against one worker that takes the same micro-batches one after the other."""
    return stages * micro_batches / (micro_batches + stages - 1)


class ScheduleSpan(NamedTuple):
    """An action in time."""

    action: Action
    begin: int
    end: int


def timeline(
    schedule: Schedule, stages: int, micro_batches: int, forward: int = 1, backward: int = 2
) -> list[list[ScheduleSpan]]:
    """When each stage does what, if every forward and backward took so long and handing over nothing."""
    plans = [list(schedule(stage, stages, micro_batches)) for stage in range(stages)]
    done: dict[tuple[int, Action], int] = {}
    spans: list[list[ScheduleSpan]] = [[] for _ in range(stages)]
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
                spans[stage].append(ScheduleSpan(action, begin, end))
                done[stage, action], now[stage], moved = end, end, True
        if not moved:
            raise AssertionError(f"{schedule.__name__} waits for itself at {stages} x {micro_batches}")
    return spans


def drawn(spans: list[list[ScheduleSpan]], width: int = 3) -> list[str]:
    """One line a stage: `F0 F1 .  B0---`, a unit of time as wide as a short name."""
    end = max(span.end for line in spans for span in line)
    lines = []
    for stage, line in enumerate(spans):
        cells = ["." + " " * (width - 1)] * end
        for span in line:
            cells[span.begin : span.end] = [_cell(span, at, width) for at in range(span.begin, span.end)]
        lines.append(f"stage {stage}  " + "".join(cells).rstrip())
    return lines


def _cell(span: ScheduleSpan, at: int, width: int) -> str:
    last = at == span.end - 1
    text = str(span.action) if at == span.begin else ""
    return (text.ljust(width, "-" if not last else " ") if text else ("-" * (width - 1)).ljust(width))[:width]
