"""The rows of a study's table: a block per task, with one row for all repeats and seeds of a cell."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from manyhands.analysis import groups, target
from manyhands.analysis.answer import Answer
from manyhands.analysis.crossing import crossing
from manyhands.analysis.groups import Key
from manyhands.analysis.scaling import Baseline, Pair, Point, baselines, points
from manyhands.analysis.target import ToTarget
from manyhands.analysis.verdicts import of_runs, word
from manyhands.core import formatting
from manyhands.core.registry.strategy_options import is_default
from manyhands.core.statistics import NOISY, Summary, measured, ratio
from manyhands.records.record import RunRecord
from manyhands.records.spec import RunSpec
from manyhands.records.study_results import Block, Results, Without
from manyhands.study.table_layout import Row, TaskTable, bracketed, draw

Together = Mapping[tuple[str, Key], str]  # by task and cell: rows with the same text belong together
_NONE: Together = MappingProxyType({})
TIED = "not told apart"


class _Measured(NamedTuple):
    """What the analyses say of a task's cells, where these were measured in pairs."""

    points: Mapping[Key, Point]
    arrivals: Mapping[Key, ToTarget]


def blocks(
    records: Sequence[RunRecord],
    failed: Sequence[Without] = (),
    together: Together = _NONE,
    paired: Sequence[Block] = (),
) -> list[TaskTable]:
    """Return a block for each task, in order of appearance; rows that belong together follow each other.

    `paired` are the measurements of paired cells. The row of such a cell also has what was learned.
    """
    study = Results(Path(), "", "", records=list(records), blocks=list(paired))
    words = {
        id(record): word(judged, won=(groups.task_name(record), groups.key(record)) in together)
        for record, judged in zip(records, of_runs(study), strict=True)
    }
    names = dict.fromkeys([*groups.tasks(records), *(without.cell.spec.task for without in failed)])
    found = []
    for name in names:
        mine = groups.of_task(records, name)
        lost = [each for each in failed if each.cell.spec.task == name]
        known = _measured_in_pairs(mine, name, paired)
        alike: dict[tuple[object, ...], list[RunRecord]] = {}
        for record in mine:
            alike.setdefault(_key(record, known), []).append(record)
        pairs: dict[int, Pair] = {}  # by batch: a large study has many rows and few batch sizes
        rows = []
        for each in alike.values():
            batch = groups.batch(each[0])
            if batch not in pairs:
                pairs[batch] = baselines(mine, name, batch, paired)
            row = _row(each, pairs[batch], known, words)
            rows.append((row, together.get((name, groups.key(each[0])), "")))
        one, _ = baselines(mine, name, None, paired)
        lines = [*bracketed(_gathered(rows)), *map(_failed, lost)]
        found.append(TaskTable(name, _header(mine), lines, one.name if one else ""))
    return found


def _measured_in_pairs(mine: Sequence[RunRecord], task: str, paired: Sequence[Block]) -> _Measured:
    found = [point for point in points(mine, task, blocks=paired) if point.cell]
    arrivals = target.to_target(mine, blocks=paired) if found else []
    return _Measured(
        {Key(point.variant, point.workers, point.threads, point.batch): point for point in found},
        {Key(each.variant, each.workers, each.threads, each.batch): each for each in arrivals},
    )


def winners(found: Sequence[Answer]) -> Together:
    """The cells that are not told apart from the fastest of their task."""
    return {
        (answer.task, Key(each.variant, each.workers, each.threads, each.batch)): TIED
        for answer in found
        for each in answer.winners
        if len(answer.winners) > 1
    }


def draw_all(results: Results, width: int | None = None, together: Together = _NONE) -> list[str]:
    """Return the whole table, with the task's name above each block if there are several."""
    found = blocks(results.records, results.failed, together, results.blocks)
    lines: list[str] = []
    for block in found:
        if len(found) > 1:
            lines += [*([""] if lines else []), block.task]
        lines += draw(block, width)
    return lines


def _gathered(rows: Sequence[tuple[Row, str]]) -> list[tuple[Row, str]]:
    """The rows in their order, but those that belong together where the first of them is."""
    texts = [text for _, text in rows]
    place = [texts.index(text) if text else number for number, text in enumerate(texts)]
    return [rows[number] for number in sorted(range(len(rows)), key=place.__getitem__)]


def _header(records: Sequence[RunRecord]) -> Row:
    targets = {formatting.threshold(record.target, record.metric_name) for record in records}
    unit = "img" if any(record.unit == "images" for record in records) else "samples"
    goal = f"to {targets.pop()}" if len(targets) == 1 else "to target"
    return Row(
        "strategy",
        "workers",
        "threads",
        "batch",
        "recipe",
        "epochs",
        f"{unit}/s",
        "speed-up",
        goal,
        "at the end",
        "verdict",
    )


def _row(alike: list[RunRecord], pair: Pair, known: _Measured, words: Mapping[int, str]) -> Row:
    first = alike[0]
    timed = [record for record in alike if groups.measured(record)]
    point, arrival = known.points.get(groups.key(first)), known.arrivals.get(groups.key(first))
    rate = point.throughput if point else measured([each.throughput for each in timed]) if timed else None
    over = point.speed_up if point else _speed_up(rate, pair[0])
    itself = pair[0] is not None and groups.key(first)[1:] == (1, pair[0].threads, pair[0].batch)
    whole = [record for record in alike if not (point and record.spec.stop_at_target)]
    scores = [record.metric for record in whole if record.metric is not None]
    end = formatting.score(statistics.median(scores), first.metric_name) if scores else ""
    return Row(
        groups.variant(first),
        _workers_text(first.spec, groups.threads(first)),
        "" if first.spec.traits.one_worker else str(groups.threads(first)),  # these are with the workers
        f"{groups.batch(first):,}",
        _recipe(first),
        "" if point else _length(first.spec),
        f"{rate.median:,.0f} (± {formatting.percent(_reach(rate) / rate.median)})" if rate else "",
        "" if over is None else f"{over.median:.2f}" + ("" if itself else f" (± {_reach(over):.2f})"),
        _arrival(arrival) if arrival and point else to_target(alike, interval=True),
        end,
        _verdict(alike, words[id(timed[0])] if timed else ""),
    )


def _speed_up(rate: Summary | None, one: Baseline | None) -> Summary | None:
    return None if rate is None or one is None else ratio(rate, one.throughput)


def _arrival(cell: ToTarget) -> str:
    """The time to the target of a paired cell."""
    if cell.seconds is None:
        return "diverged" if cell.diverged == cell.of else "not reached"
    text = formatting.duration(cell.seconds.median) + _plus_minus(cell.seconds)
    return text if cell.reached == cell.of else f"{text} ({cell.reached} of {cell.of})"


def _reach(value: Summary) -> float:
    """Half the width of an interval around its median; of an uneven one, the longer side."""
    return max(value.high - value.median, value.median - value.low)


def _verdict(alike: list[RunRecord], said: str) -> str:
    noise = max((record.machine_noise or 0.0 for record in alike), default=0.0)
    if noise > NOISY and "noisy" not in said:
        flag = f"noisy: machine {formatting.percent(noise)} slower"
        said = f"{said}, {flag}" if said else flag
    return said


def _failed(without: Without) -> Row:
    spec = without.cell.spec
    text = f"failed: {without.reason.splitlines()[0] if without.reason else ''}"
    batch = f"{spec.batch:,}" if spec.batch else ""
    options = {
        name: value
        for name, value in spec.strategy_options.items()
        if not is_default(spec.traits.options, name, value)
    }
    strategy = " ".join([spec.strategy, *(f"{name}={value}" for name, value in options.items())])
    return Row(strategy, _workers_text(spec), "", batch, "", "", "", "", "", "", text)


def to_target(alike: Sequence[RunRecord], *, interval: bool = False) -> str:
    """`5.0 s`, or `412 steps` if not timed; with `(2 of 3)` if not all of them reached the target."""
    tried = [record for record in alike if groups.attempted(record)]
    if not tried:
        return ""
    reached = [record for record in tried if groups.succeeded(record)]
    if not reached:
        return "diverged" if all(record.status == "diverged" for record in tried) else "not reached"
    crossings = [(record, found) for record in reached if (found := crossing(record)) is not None]
    seconds = [found.seconds for record, found in crossings if record.timed and found.seconds is not None]
    steps = [found.steps for _, found in crossings]
    [cell] = target.to_target(tried)
    if seconds and cell.seconds:
        text = formatting.duration(cell.seconds.median) + (_plus_minus(cell.seconds) if interval else "")
    elif seconds:
        text = formatting.duration(statistics.median(seconds))
    else:
        text = formatting.plural(round(statistics.median(steps)), "step") if steps else "reached"
    return text if len(reached) == len(tried) else f"{text} ({len(reached)} of {len(tried)})"


def _plus_minus(seconds: Summary) -> str:
    """` (± 0.4)` behind `6.1 s`, ` (± 8 ms)` behind `73 ms`, ` (± 12 s)` behind `2 min 5 s`."""
    reach = _reach(seconds)
    shown = formatting.duration(reach)
    plain = 0.0995 <= seconds.median < 59.5 and 0.0995 <= reach < 59.5
    return f" (± {shown.removesuffix(' s') if plain else shown})"


def _key(record: RunRecord, known: _Measured) -> tuple[object, ...]:
    """What the repeats and seeds of a cell have in common; a paired cell's speed and learning are one row."""
    spec = record.spec
    if groups.key(record) in known.points:
        return groups.key(record), groups.recipe_key(record)
    limits = (spec.epochs, spec.samples, spec.seconds, spec.target)
    return groups.key(record), groups.recipe_key(record), limits


def _length(spec: RunSpec) -> str:
    return formatting.duration(spec.seconds) if spec.seconds else f"{spec.epochs:g}" if spec.epochs else ""


def _workers_text(spec: RunSpec, threads: int = 1) -> str:
    """`2`, `2+1` with a server; the threads of the strategy that always has one worker: `2 threads`."""
    if spec.traits.one_worker and threads > 1:
        return formatting.plural(threads, "thread")
    return f"{spec.workers}+{spec.servers}" if spec.servers else str(spec.workers)


def _recipe(record: RunRecord) -> str:
    lr = record.recipe.get("lr")
    return groups.recipe_variant(record) + (f", lr {lr:g}" if isinstance(lr, float | int) else "")
