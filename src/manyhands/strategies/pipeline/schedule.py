"""Pipeline schedules as pure generators: what one stage does, in order; the worker executes it.

Two stages, four micro-batches, a backward twice as long as a forward:

    gpipe   all forwards, then all backwards: a stage holds every micro-batch at once

        stage 0  F0 F1 F2 F3 .  .  .  B0--- B1--- B2--- B3---
        stage 1  .  F0 F1 F2 F3 B0--- B1--- B2--- B3--- .  .

    1f1b    a backward as soon as possible: a stage holds as many as there are stages from it to the end

        stage 0  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3---
        stage 1  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .

Both are idle for (stages - 1) / (micro-batches + stages - 1) of the time. Backwards follow the order of the
micro-batches, so gradients are added in the order in which one worker would add them: the same bits.
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
    """One forward per stage that follows, then one forward and one backward in turn (PipeDream, Megatron)."""
    ahead = min(stages - stage - 1, micro_batches)
    yield from (Action("forward", number) for number in range(ahead))
    for number in range(micro_batches - ahead):
        yield Action("forward", ahead + number)
        yield Action("backward", number)
    yield from (Action("backward", number) for number in range(micro_batches - ahead, micro_batches))


SCHEDULES: Mapping[str, Schedule] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def in_flight(schedule: Schedule, stage: int, stages: int, micro_batches: int) -> int:
    """The most micro-batches that a stage holds at one time, between their forward and their backward."""
    held = most = 0
    for action in schedule(stage, stages, micro_batches):
        held += 1 if action.kind == "forward" else -1
        most = max(most, held)
    return most


def idle_share(stages: int, micro_batches: int) -> float:
    """The part of a step in which a stage is idle, if all stages take the same time."""
    return (stages - 1) / (micro_batches + stages - 1)


def ideal_speedup(stages: int, micro_batches: int) -> float:
    """The speedup over one worker that runs the same micro-batches one after the other."""
    return stages * micro_batches / (micro_batches + stages - 1)
