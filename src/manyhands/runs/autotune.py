"""Settings chosen by short measurements: workers and threads (`--workers auto`), and micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from manyhands.core import environment, formatting, registry
from manyhands.core.registry import launchers, strategies, transports
from manyhands.core.registry.launchers import LAUNCHERS
from manyhands.core.signals import StopRequest
from manyhands.launchers.base import Launcher
from manyhands.records.spec import RunSpec

ROUNDS, SECONDS = 2, 1.0  # each split is measured this often, in turn, for this many seconds
BRIEFLY = 0.4  # seconds per measurement of a number of micro-batches
LEAST = 8  # samples per micro-batch: smaller ones are slow, and batch norm's statistics would be poor


class Split(NamedTuple):
    """One way to use the cores, and its measured speed."""

    workers: int
    threads: int
    samples_per_second: float = 0.0

    def __str__(self) -> str:
        return f"{formatting.plural(self.workers, 'worker')} x {formatting.plural(self.threads, 'thread')}"


def splits(cores: int, batch: int) -> list[Split]:
    """Return every division of the cores that leaves no core idle and no worker without a sample."""
    return [Split(n, cores // n) for n in range(1, cores + 1) if cores % n == 0 and n <= batch]


def choose(spec: RunSpec, unit: str, notice: Callable[[str], None]) -> RunSpec:
    """Return the (resolved) spec with the fastest split: the best of interleaved rounds, to reduce noise."""
    from manyhands.engine.probe import measure

    assert spec.batch is not None
    found = splits(environment.cores(), spec.batch)
    launcher: Launcher = registry.member("launcher", LAUNCHERS, launchers.LOCAL)()
    speeds = [0.0] * len(found)
    for _ in range(ROUNDS if len(found) > 1 else 0):
        for number, split in enumerate(found):
            speed = _measured(launcher, measure, split.workers, placed(spec, split), SECONDS)
            speeds[number] = max(speeds[number], speed)
    measured = [split._replace(samples_per_second=speed) for split, speed in zip(found, speeds, strict=True)]
    best = max(measured, key=lambda split: split.samples_per_second)
    tried = ", ".join(f"{split} {formatting.rate(split.samples_per_second, unit)}" for split in measured)
    notice(f"auto: {tried}: taking {best}")
    return placed(spec, best)


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
    found: list[float] = _measured(launcher, measure_each, spec.ranks, specs, ROUNDS, BRIEFLY)
    speeds = dict(zip(counts, found, strict=True))
    best = max(counts, key=lambda count: speeds[count])
    tried = ", ".join(f"{count}: {formatting.rate(speeds[count], unit)}" for count in counts)
    notice(f"micro-batches {tried}: taking {best}")
    return specs[counts.index(best)]


def _measured(launcher: Launcher, function: Callable[..., Any], ranks: int, *arguments: Any) -> Any:
    """Return the result of rank 0; signals are handled also while workers start and end."""
    from manyhands.engine.probe import interrupted

    with StopRequest() as stop:
        found = launcher.launch(function, ranks, *arguments)[0]
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
