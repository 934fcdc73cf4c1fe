"""`--dry-run`: the cells in groups, those that cannot work and why, and the estimated time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from manyhands.core import formatting
from manyhands.core.errors import DataUnavailableError, UsageError
from manyhands.records.spec import RunSpec
from manyhands.records.study_results import Cell, StudyFolder, Without
from manyhands.study import estimate
from manyhands.study.estimate import CellEstimate
from manyhands.study.journal_history import History
from manyhands.study.study_file import Study
from manyhands.study.study_state import cell_title


class Preview(NamedTuple):
    """What a study would run."""

    study: Study
    out: Path
    left: list[Cell]
    finished: list[Cell]
    excluded: list[Without]
    time: CellEstimate


def preview(study: Study, out: Path, jobs: int = 1) -> Preview:
    """Check every cell and estimate its time, without running or downloading anything."""
    history = History(StudyFolder(out).events(), "")
    finished = [cell for cell in study.cells if history.is_finished(cell)]
    waiting = [cell for cell in study.cells if not history.is_finished(cell)]
    facts = estimate.known(estimate.earlier(waiting, out))
    excluded = list(study.excluded)
    probed: set[str] = set()
    specs: dict[str, RunSpec] = {}
    for cell in sorted(waiting, key=lambda cell: cell.spec.task):  # only the last built task is kept
        try:
            resolved = _resolved(cell.spec)
        except UsageError as error:
            excluded.append(Without(cell, str(error)))
            continue
        specs[cell.key] = resolved or cell.spec
        if resolved and cell.spec.task not in probed and estimate.nearest(resolved, facts) is None:
            facts.append(estimate.probe(resolved))
            probed.add(cell.spec.task)
    left = [cell for cell in waiting if cell.key in specs]
    pairing = estimate.Pairing(study.block, study.rounds, study.min_rounds)
    if study.budget:
        others = [cell for cell in left if not cell.paired]
        rest = estimate.estimate(others, facts, jobs, specs).seconds
        pairing = pairing.within(study.budget - rest, len(left) - len(others))
    time = estimate.estimate(left, facts, jobs, specs, pairing)
    return Preview(study, out, left, finished, excluded, time)


def _resolved(spec: RunSpec) -> RunSpec | None:
    """Return the resolved spec, or None if its data are not downloaded."""
    if not estimate.in_cache(spec.task):
        return None
    from manyhands.runs.resolve import resolve

    try:
        return resolve(spec)
    except DataUnavailableError:
        return None


def draw(found: Preview) -> list[str]:
    """Return the preview as lines of text."""
    study = found.study
    lines = [study.title if study.title != study.name else study.name]
    lines += [study.about] if study.about else []
    counts = [formatting.plural(len(found.left), "cell")]
    counts += [f"{len(found.finished)} finished before"] if found.finished else []
    counts += [f"{len(found.excluded)} excluded"] if found.excluded else []
    counts += [f"{study.left_out} left out by the file"] if study.left_out else []
    counts += [f"budget {formatting.duration(study.budget)}"] if study.budget else []
    lines += [" · ".join([*counts, how_long(found.time), str(found.out)]), ""]
    lines += _groups(found)
    if found.excluded:
        lines += ["", "excluded:"]
        lines += [f"  {cell_title(each.cell)}: {each.reason}" for each in found.excluded]
    return lines


def how_long(time: CellEstimate) -> str:
    """`about 4 min (12 cells estimated from earlier runs; mnist-cnn measured for one second)`."""
    if not time.by_cell:
        return "its duration is unknown: no earlier run is similar, and its data are not downloaded"
    bases = [f"{formatting.plural(time.runs, 'cell')} estimated from earlier runs"] if time.runs else []
    bases += [f"{', '.join(time.probed)} measured for one second"] if time.probed else []
    bases += ["longer than usual because the machine is busy"] if time.busy else []
    bases += [f"without {', '.join(time.unknown)}, whose data are not downloaded"] if time.unknown else []
    return f"about {formatting.duration(time.seconds)} ({'; '.join(bases)})"


def to_json(found: Preview) -> dict[str, Any]:
    """Return the preview as data for JSON."""
    return {
        "study": found.study.name,
        "out": str(found.out),
        "cells": [
            {**cell.to_json(), "cell": cell.key, "seconds": found.time.by_cell.get(cell.key)}
            for cell in found.left
        ],
        "finished": [cell.key for cell in found.finished],
        "excluded": [{**each.cell.to_json(), "reason": each.reason} for each in found.excluded],
        "seconds": found.time.seconds if found.time.by_cell else None,
        "estimate": how_long(found.time),
    }


def _groups(found: Preview) -> list[str]:
    """One line for all cells that differ only in workers, batch, learning rate, seed and repeat."""
    rows = []
    for name, cells in _rectangles(found.left):
        seconds = [found.time.by_cell[cell.key] for cell in cells if cell.key in found.time.by_cell]
        spent = formatting.duration(sum(seconds)) if len(seconds) == len(cells) else ""
        rows.append((name, _varying(cells), formatting.plural(len(cells), "cell"), spent))
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    return [
        f"  {name:{widths[0]}}  {what:{widths[1]}}  {count:>{widths[2]}}  {spent:>{widths[3]}}".rstrip()
        for name, what, count, spent in rows
    ]


def _rectangles(cells: list[Cell]) -> Iterator[tuple[str, list[Cell]]]:
    """Group cells so that each group has all combinations of its values; else one group per worker count."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(_group(cell), []).append(cell)
    for name, group in groups.items():
        if len(group) == math.prod(len(set(values)) for values in _axes(group).values()):
            yield name, group
            continue
        for workers in dict.fromkeys(cell.spec.workers for cell in group):
            yield name, [cell for cell in group if cell.spec.workers == workers]


def _group(cell: Cell) -> str:
    spec = cell.spec
    options = {name: value for name, value in spec.recipe_options.items() if name != "lr"}
    named = [f"{name}={value}" for name, value in {**spec.options, **spec.strategy_options}.items()]
    limits = [("epoch", spec.epochs), ("second", spec.seconds), ("sample", spec.samples)]
    parts = [
        spec.task,
        " ".join([spec.strategy, *named]),
        formatting.plural(spec.threads, "thread") if spec.threads else "",
        spec.recipe or "",
        *(f"{name} {value}" for name, value in options.items()),
        *(formatting.plural(value, name) for name, value in limits if value is not None and not cell.paired),
        "speed in pairs" if cell.paired else "" if cell.timed else "not timed",
    ]
    return " · ".join(part for part in parts if part)


def _axes(cells: list[Cell]) -> dict[str, list[Any]]:
    """The values of the settings that may vary in a group."""
    return {
        "workers": [cell.spec.workers for cell in cells],
        "batch": [cell.spec.batch or 0 for cell in cells],
        "lr": [cell.spec.recipe_options.get("lr", 0) for cell in cells],
        "seeds": [cell.spec.seed for cell in cells],
        "repeats": [cell.repeat for cell in cells],
    }


def _varying(cells: list[Cell]) -> str:
    axes = _axes(cells)
    parts = [_list("workers", axes["workers"])]
    parts += [_list(name, axes[name]) for name in ("batch", "lr") if any(axes[name])]
    parts += [_list("seeds", axes["seeds"])] if len(set(axes["seeds"])) > 1 else []
    times = 1 + max(axes["repeats"])
    return " · ".join([*parts, *([f"{times} times"] if times > 1 else [])])


def _list(name: str, values: list[Any]) -> str:
    """`batch 128, 256`."""
    texts = [f"{value:,}" if isinstance(value, int) else str(value) for value in sorted(set(values))]
    return f"{name} {', '.join(texts)}"
