"""How often workers must average: every step, every H steps, or once at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from manyhands.analysis import groups
from manyhands.claims.base import Claim, Finding, Part, Row, settled_by, together, unsettled
from manyhands.claims.intervals import Level, difference, knee, mean
from manyhands.claims.plots import Dot, Line, Plot
from manyhands.claims.seeds import BySeed, by_seed, fewest, seconds, too_few
from manyhands.core import formatting
from manyhands.core.statistics import Estimate
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Results

EPOCHS = 2  # fewer show the first steps of training only, where copies drift apart fastest
LOST = 0.01  # of accuracy: less than a point counts as nothing
END = "end"
STABLE = (
    "mnist-",
    "digits-",
)  # tasks whose networks are stable from their initialization (Frankle et al. 2020)
FEWER = (
    0.9  # times H: at least so many fewer bytes; buffers of batch norm and the last average are a few more
)


class Averaged(NamedTuple):
    """The runs that average after a number of steps."""

    every: int | str
    accuracy: BySeed
    sent: float  # bytes per worker
    records: list[RunRecord]

    @property
    def mean(self) -> float:
        return sum(self.accuracy.values()) / len(self.accuracy)


def judge(results: Results) -> Finding:
    """Find the largest H that loses nothing, what one average at the end costs, and the bytes of each."""
    runs = [
        record
        for record in results.records
        if record.spec.traits.averaging and groups.higher_is_better(record)  # accuracy, not a loss
    ]
    parts: list[Part] = []
    table: list[Row] = []
    plots: list[Plot] = []
    for task in groups.tasks(runs):
        for workers in sorted({record.spec.workers for record in groups.of_task(runs, task)}):
            mine = [record for record in groups.of_task(runs, task) if record.spec.workers == workers]
            found = _averaged(mine)
            rarely = [each for each in found if isinstance(each.every, int) and each.every > 1]
            each_step = next((each for each in found if each.every == 1), None)
            end = next((each for each in found if each.every == END), None)
            if each_step is None or not rarely:
                continue
            name = f"{task}, {formatting.plural(workers, 'worker')}"
            seeds = fewest(each.records for each in found)
            decided = [_largest(name, each_step, rarely), _bytes(name, each_step, rarely)]
            decided += [_at_the_end(name, each_step, end)] if end is not None else []
            parts += [settled_by(part, seeds, seconds(mine)) for part in decided]
            table += [_row(task, workers, each_step, each) for each in found]
            plots += [_accuracy_plot(name, found), _bytes_plot(name, found)]
    if not parts:
        return unsettled("this needs strategy average with every 1, some number of steps, and end")
    return together(parts, table, plots=plots)


def _averaged(records: Sequence[RunRecord]) -> list[Averaged]:
    """By the number of steps between averages, ascending; the end comes last."""
    found: dict[int | str, list[RunRecord]] = {}
    for record in records:
        every = groups.option(record, record.spec.traits.interval)
        found.setdefault(int(every) if str(every).isdecimal() else str(every), []).append(record)
    order = sorted(found, key=lambda every: (isinstance(every, str), every if isinstance(every, int) else 0))
    return [
        Averaged(every, by_seed(found[every], _accuracy), _sent(found[every]), found[every])
        for every in order
    ]


def _accuracy(record: RunRecord) -> float:
    return 0.0 if record.status == "diverged" else record.metric or 0.0


def _sent(records: Sequence[RunRecord]) -> float:
    """Bytes per worker in training, the mean over runs."""
    return sum(sum(each["bytes"] for each in record.traffic[-1].values()) for record in records) / len(
        records
    )


def _lost(each_step: Averaged, each: Averaged) -> Estimate:
    return difference(each_step.accuracy, each.accuracy)


def _largest(name: str, each_step: Averaged, rarely: Sequence[Averaged]) -> Part:
    levels = [Level(float(each.every), _lost(each_step, each)) for each in rarely]
    found = knee(levels, LOST, 1.0)
    told = ", ".join(
        f"{formatting.percent(each.mean, 1)} every {each.every}" for each in [each_step, *rarely]
    )
    text = f"{name}: {told} steps; "
    if found.low > 1:
        text += f"an average every {found.low:.0f} steps surely loses less than a point"
    else:
        text += f"the largest interval that loses less than a point is about {found.value:.0f}"
    weak = too_few(fewest([each_step.records, *(each.records for each in rarely)]))
    shortest = min(record.epochs for each in (each_step, *rarely) for record in each.records)
    if shortest < EPOCHS:  # the copies of the papers have long settled when they are compared
        weak = f"it was trained for {shortest:.2g} of at least {EPOCHS} epochs"
    part = f"{name}: steps between averages that lose nothing"
    return Part(part, found, float(rarely[0].every), True, text, weak)


def _bytes(name: str, each_step: Averaged, rarely: Sequence[Averaged]) -> Part:
    """How many times fewer bytes are sent, relative to H: a count, so its interval is the range."""
    fewer = [each_step.sent / each.sent / float(each.every) for each in rarely if each.sent]
    found = Estimate(min(fewer), min(fewer), max(fewer)) if fewer else mean([])
    last = rarely[-1]
    text = f"an average every {last.every} steps sends {each_step.sent / max(1.0, last.sent):.1f} times less"
    return Part(f"{name}: bytes, relative to H times fewer", found, FEWER, True, text)


def _at_the_end(name: str, each_step: Averaged, end: Averaged) -> Part:
    found = _lost(each_step, end)
    low, high = (f"{100 * value:.1f}" for value in found[1:])
    text = (
        f"one average at the end gives {formatting.percent(end.mean, 1)}, {100 * found.value:.1f} points "
        f"({low} to {high}) less"
    )
    weak = too_few(fewest([each_step.records, end.records]))
    if groups.task_name(end.records[0]).startswith(STABLE):
        weak = "small networks on such data are stable from their initialization (Frankle et al. 2020)"
    return Part(f"{name}: what one average at the end loses", found, LOST, True, text, weak, unit="points")


def _row(task: str, workers: int, each_step: Averaged, each: Averaged) -> Row:
    lost = _lost(each_step, each)
    return {
        "task": task,
        "workers": workers,
        "an average every": f"{each.every} steps" if isinstance(each.every, int) else each.every,
        "accuracy": formatting.percent(each.mean, 2),
        "points lost": "0"
        if each is each_step
        else f"{100 * lost.value:.1f} ({100 * lost.low:.1f} to {100 * lost.high:.1f})",
        "seeds": len(each.accuracy),
        "sent per worker": formatting.size(each.sent),
    }


def _accuracy_plot(name: str, found: Sequence[Averaged]) -> Plot:
    dots = []
    for each in found:
        interval = mean(list(each.accuracy.values()))
        known = abs(interval.low) < 1e9
        dots.append(
            Dot(
                f"{each.every}",
                each.mean,
                max(0.0, interval.low) if known else None,
                min(1.0, interval.high) if known else None,
            )
        )
    return Plot(
        f"{name}: accuracy",
        "steps between averages",
        "test accuracy at the end",
        [Line("here", dots)],
        percent=True,
    )


def _bytes_plot(name: str, found: Sequence[Averaged]) -> Plot:
    return Plot(
        f"{name}: bytes",
        "steps between averages",
        "MB sent per worker",
        [Line("here", [Dot(f"{each.every}", each.sent / 1e6) for each in found])],
        log_y=True,
    )


AVERAGING = Claim(
    "averaging",
    "Workers that average every H steps learn as well as workers that average every step, for H times less "
    "communication; one average at the end does not.",
    "McDonald et al. 2010, Stich 2019, Lin et al. 2020",
    judge,
    "35 min",
    [
        "Accuracies are compared on the same seed. The largest H that loses nothing lies between the last "
        "that surely loses less than a point and the first that surely loses more.",
        "The network is not stable from its initialization: copies that start from the same parameters drift "
        "apart. Small networks on MNIST are stable (Frankle et al. 2020), and could not show what one "
        "average at the end costs.",
        "The papers have no figure of accuracy against H for this network; beside the accuracy are the "
        "bytes.",
    ],
)
