"""Steps once, seconds apart: which runs made the steps that a cell would make.

Synchronous strategies make the steps that one worker makes with the same batch (law 4), so one run per seed
tells for all of them how many samples the target takes. Strategies that make other steps need runs of their
own, and so do models for which the division of a batch matters (dropout, batch norm without synchronization).
"""

from __future__ import annotations

from collections.abc import Iterable

from manyhands.analysis import groups
from manyhands.records.record import RunRecord

Trajectory = tuple[object, ...]


def trajectory(record: RunRecord) -> Trajectory:
    """Equal for runs that make the same steps, if they have the same recipe and seed."""
    spec = record.spec
    what = groups.task_name(record), groups.batch(record), spec.dtype
    undivided = spec.workers == 1 and spec.accumulate == 1
    if spec.traits.exact and (undivided or record.split_matters is False):
        return what
    return *what, groups.setting(record), spec.workers


def same_steps(record: RunRecord) -> bool:
    """Whether a run makes the steps that one worker makes, so that only its speed needs to be measured."""
    one_worker = groups.one_plain_worker(groups.variant(record), record.spec.workers)
    return one_worker or (record.spec.traits.exact and not record.split_matters)


def learned(records: Iterable[RunRecord], record: RunRecord) -> list[RunRecord]:
    """The runs that tried what a cell would learn: with its recipe, or else with any other one."""
    wanted = trajectory(record)
    alike = [each for each in records if groups.attempted(each) and trajectory(each) == wanted]
    same = [each for each in alike if groups.recipe_key(each) == groups.recipe_key(record)]
    return same or alike
