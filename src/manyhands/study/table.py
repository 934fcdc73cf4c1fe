"""The table of a study: a block per task, with one row for all repeats and seeds of a cell; then as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from manyhands.analysis import groups
from manyhands.analysis.crossing import crossing
from manyhands.analysis.scaling import Pair, baselines
from manyhands.analysis.verdicts import verdicts, word
from manyhands.core import formatting
from manyhands.core.statistics import NOISY
from manyhands.records.record import RunRecord
from manyhands.records.spec import RunSpec
from manyhands.records.study_results import Results, Without

_LEFT = ("strategy", "recipe", "verdict")  # columns of words; numbers are aligned to the right


class Row(NamedTuple):
    """One row of a task's block, as text."""

    strategy: str
    workers: str
    threads: str
    batch: str
    recipe: str
    epochs: str
    rate: str
    speed_up: str
    to_target: str
    at_the_end: str
    verdict: str


class Block(NamedTuple):
    """The rows of one task."""

    task: str
    header: Row
    rows: list[Row]
    baseline: str = ""  # what the speed-ups are relative to


def blocks(records: Sequence[RunRecord], failed: Sequence[Without] = ()) -> list[Block]:
    """Return a block for each task, in order of appearance."""
    names = dict.fromkeys([*groups.tasks(records), *(without.cell.spec.task for without in failed)])
    found = []
    for name in names:
        mine = groups.of_task(records, name)
        lost = [each for each in failed if each.cell.spec.task == name]
        alike: dict[tuple[object, ...], list[RunRecord]] = {}
        for record in mine:
            alike.setdefault(_key(record), []).append(record)
        pairs: dict[int, Pair] = {}  # by batch: a large study has many rows and few batch sizes
        rows = []
        for each in alike.values():
            batch = groups.batch(each[0])
            if batch not in pairs:
                pairs[batch] = baselines(mine, name, batch)
            rows.append(_row(each, pairs[batch]))
        rows += [_failed(without) for without in lost]
        one, _ = baselines(mine, name, None)
        found.append(Block(name, _header(mine), rows, one.name if one else ""))
    return found


def draw(block: Block, width: int | None = None, footnote: bool = True) -> list[str]:
    """Return aligned columns, without those that say nothing; lines longer than the width are cut."""
    lines = [block.header, *block.rows]
    same = {"threads", "recipe", "epochs"}  # shown only if they differ
    texts = []
    for number, name in enumerate(Row._fields):
        column = [line[number] for line in lines]
        values = set(column[1:]) - {""}
        if not values or (name in same and len(values) == 1):
            continue
        longest = max(map(len, column))
        texts.append([text.ljust(longest) if name in _LEFT else text.rjust(longest) for text in column])
    drawn = [" " + "  ".join(row).rstrip() for row in zip(*texts, strict=True)]
    if footnote and any(row.speed_up for row in block.rows):
        drawn.append(f" speed-up: over {block.baseline}")
    return [cut(line, width) for line in drawn]


def draw_all(results: Results, width: int | None = None) -> list[str]:
    """Return the whole table, with the task's name above each block if there are several."""
    found = blocks(results.records, results.failed)
    lines: list[str] = []
    for block in found:
        if len(found) > 1:
            lines += [*([""] if lines else []), block.task]
        lines += draw(block, width)
    return lines


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


def _row(alike: list[RunRecord], pair: Pair) -> Row:
    first = alike[0]
    timed = [record for record in alike if groups.measured(record)]
    rate = statistics.median(record.throughput for record in timed) if timed else None
    one, _ = pair
    speed_up = f"{rate / one.throughput.median:.2f}" if rate and one else ""
    scores = [record.metric for record in alike if record.metric is not None]
    end = formatting.score(statistics.median(scores), first.metric_name) if scores else ""
    return Row(
        groups.variant(first),
        _workers_text(first.spec),
        str(groups.threads(first)),
        f"{groups.batch(first):,}",
        _recipe(first),
        _length(first.spec),
        f"{rate:,.0f}" if rate else "",
        speed_up,
        to_target(alike),
        end,
        _verdict(alike, timed, pair),
    )


def _verdict(alike: list[RunRecord], timed: list[RunRecord], pair: Pair) -> str:
    said = word(verdicts(timed[0], *pair)) if timed else ""
    noise = max((record.machine_noise or 0.0 for record in alike), default=0.0)
    if noise > NOISY and "noisy" not in said:
        flag = f"noisy: machine {formatting.percent(noise)} slower"
        said = f"{said}, {flag}" if said else flag
    return said


def _failed(without: Without) -> Row:
    spec = without.cell.spec
    text = f"failed: {without.reason.splitlines()[0] if without.reason else ''}"
    batch = f"{spec.batch:,}" if spec.batch else ""
    return Row(spec.strategy, _workers_text(spec), "", batch, "", "", "", "", "", "", text)


def to_target(alike: Sequence[RunRecord]) -> str:
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
    if seconds:
        text = formatting.duration(statistics.median(seconds))
    else:
        text = formatting.plural(round(statistics.median(steps)), "step") if steps else "reached"
    return text if len(reached) == len(tried) else f"{text} ({len(reached)} of {len(tried)})"


def _key(record: RunRecord) -> tuple[object, ...]:
    """What the repeats and seeds of a cell have in common."""
    spec = record.spec
    limits = (spec.epochs, spec.samples, spec.seconds, spec.target)
    return groups.key(record), groups.recipe_key(record), limits


def _length(spec: RunSpec) -> str:
    return formatting.duration(spec.seconds) if spec.seconds else f"{spec.epochs:g}" if spec.epochs else ""


def _workers_text(spec: RunSpec) -> str:
    return f"{spec.workers}+{spec.servers}" if spec.servers else str(spec.workers)


def _recipe(record: RunRecord) -> str:
    lr = record.recipe.get("lr")
    return groups.recipe_variant(record) + (f", lr {lr:g}" if isinstance(lr, float | int) else "")


def cut(text: str, width: int | None) -> str:
    """Cut a text to at most this many characters."""
    return text if width is None or len(text) <= width else text[: max(1, width - 1)] + "…"
