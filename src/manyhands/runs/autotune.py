"""Settings chosen by short measurements: workers and threads (`--workers auto`), and micro-batches."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from manyhands.core import environment, formatting, plausible, registry
from manyhands.core.registry import launchers, strategies, transports
from manyhands.core.registry.launchers import LAUNCHERS
from manyhands.core.signals import StopRequest
from manyhands.core.statistics import Summary
from manyhands.core.statistics import measured as summary_of
from manyhands.launchers.base import Launcher
from manyhands.records.spec import RunSpec
from manyhands.runs.launching import launch

ROUNDS, SECONDS = 2, 1.0  # each split is measured this often, in turn, for this many seconds
BRIEFLY = 0.4  # seconds per measurement of a number of micro-batches
LEAST = 8  # samples per micro-batch: smaller ones are slow, and batch norm's statistics would be poor


Round = list[float]  # samples per second of every split, measured one after the other


class Split(NamedTuple):
    """One way to use the cores."""

    workers: int
    threads: int

    def __str__(self) -> str:
        return f"{formatting.plural(self.workers, 'worker')} x {formatting.plural(self.threads, 'thread')}"


class Choice(NamedTuple):
    """A split, and why it was chosen if it is not simply the fastest."""

    split: Split
    why: str


def splits(cores: int, batch: int) -> list[Split]:
    """Return every division of the cores that leaves no core idle and no worker without a sample."""
    return [Split(n, cores // n) for n in range(1, cores + 1) if cores % n == 0 and n <= batch]


def choose(spec: RunSpec, unit: str, notice: Callable[[str], None]) -> RunSpec:
    """Return the (resolved) spec with the fastest split, or the simplest of those not told apart from it."""
    from manyhands.engine.probe import measure

    assert spec.batch is not None
    cores = environment.cores()
    found = splits(cores, spec.batch)
    launcher: Launcher = registry.member("launcher", LAUNCHERS, launchers.LOCAL)()

    def rounds(number: int) -> list[Round]:
        return [
            [_measured(launcher, placed(spec, each), measure, placed(spec, each), SECONDS) for each in found]
            for _ in range(number)
        ]

    if len(found) == 1:
        notice(f"auto: taking {found[0]}, the only split of the cores")
        return placed(spec, found[0])
    measured = rounds(ROUNDS)
    if beyond(measured, cores):
        notice("auto: a speed is more than the cores can give; measuring again")
        measured = rounds(ROUNDS)
    chosen = decide(found, measured)
    named = ", ".join(
        f"{split} {formatting.rate(statistics.median(speeds), unit)}"
        for split, speeds in zip(found, zip(*measured, strict=True), strict=True)
    )
    notice(f"auto: {named}{chosen.why}: taking {chosen.split}")
    if speed_up := beyond(measured, cores):
        notice(f"auto: {plausible.sentence(speed_up, cores, str(found[0]))}")
    return placed(spec, chosen.split)


def decide(found: Sequence[Split], rounds: Sequence[Round]) -> Choice:
    """The fastest split, or the one with the fewest workers among those that are not told apart from it.

    Speeds are compared within a round, so that whatever the machine did in that round cancels.
    """
    best = max(range(len(found)), key=lambda at: against(rounds, at, 0).median)
    told_apart = [at != best and against(rounds, best, at).low > 1 for at in range(len(found))]
    left = [split for split, slower in zip(found, told_apart, strict=True) if not slower]
    simplest = min(left, key=lambda split: split.workers)
    if len(left) == 1:
        return Choice(simplest, "")
    which = "these are" if len(left) == len(found) else f"{' and '.join(map(str, left))} are"
    return Choice(simplest, f"; {which} not told apart, so the fewest workers are best")


def against(rounds: Sequence[Round], one: int, other: int) -> Summary:
    """How many times as fast one split is as another, from the ratios within each round."""
    return summary_of([speeds[one] / speeds[other] for speeds in rounds])


def beyond(rounds: Sequence[Round], cores: int) -> Summary | None:
    """The largest speed-up over one worker that is more than the cores can give; None if there is none."""
    found = [against(rounds, at, 0) for at in range(1, len(rounds[0]))]
    largest = max(found, key=lambda each: each.low)
    return largest if plausible.implausible(largest, cores) else None


def with_micro_batches(spec: RunSpec, unit: str, notice: Callable[[str], None]) -> RunSpec:
    """Return the (resolved) spec of a pipeline with the number of micro-batches measured to be the fastest.

    Few micro-batches leave stages idle, many are small and slow: it depends on the model and the machine.
    """
    from manyhands.engine.probe import measure_each

    assert spec.batch is not None
    share = spec.batch // spec.replicas
    counts = [count for count in (1, 2, 4, 8, 16, 32) if count == 1 or share // count >= LEAST]
    specs = [_in_parts(spec, count) for count in counts]
    if not LAUNCHERS[spec.launcher].probes:
        chosen = specs[min(len(specs) - 1, 3)]
        parts = formatting.plural(chosen.micro_batches, "micro-batch", "micro-batches")
        notice(f"{parts} per batch; choose another number with --micro-batches")
        return chosen
    launcher: Launcher = registry.member("launcher", LAUNCHERS, spec.launcher)()
    found: list[float] = _measured(launcher, spec, measure_each, specs, ROUNDS, BRIEFLY)
    speeds = dict(zip(counts, found, strict=True))
    best = max(counts, key=lambda count: speeds[count])
    tried = ", ".join(f"{count}: {formatting.rate(speeds[count], unit)}" for count in counts)
    notice(f"micro-batches {tried}: taking {best}")
    return specs[counts.index(best)]


def _measured(launcher: Launcher, spec: RunSpec, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of rank 0; signals are handled also while workers start and end."""
    from manyhands.engine.probe import interrupted

    with StopRequest() as stop:
        found = launch(launcher, spec, function, *arguments)[0]
    if stop.signal is not None:
        raise interrupted(stop.signal)
    return found


def _in_parts(spec: RunSpec, count: int) -> RunSpec:
    return spec.replace(strategy_options={**spec.strategy_options, "micro_batches": count})


def placed(spec: RunSpec, split: Split) -> RunSpec:
    """Return the spec with the workers and threads of this split."""
    if split.workers == 1:
        launcher = launchers.default(1, None, spec.restarts)
        return spec.alone(threads=split.threads, launcher=launcher)
    return spec.replace(
        workers=split.workers,
        threads=split.threads,
        strategy=strategies.DATA_PARALLEL,
        transport=transports.ONE_HOST,
        launcher=launchers.LOCAL,
    )
