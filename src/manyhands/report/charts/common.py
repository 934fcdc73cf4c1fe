"""Helpers of several charts: named data, colors and shapes of variants, axes of workers and batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt

from manyhands.core import formatting
from manyhands.core.registry.strategies import ONE_WORKER
from manyhands.report import palette
from manyhands.report.figure import Row


def rows(name: str = "rows") -> alt.Chart:
    """Return a chart that reads the panel's data with this name."""
    return alt.Chart(alt.NamedData(name=name))


def layered(*views: alt.Chart) -> alt.LayerChart:
    """Return the views as layers of one chart; `alt.layer` would return something else for facets only."""
    whole = alt.layer(*views)
    assert isinstance(whole, alt.LayerChart)
    return whole


def names(data: Iterable[Row], field: str = "variant") -> list[str]:
    """The distinct values of a field, in order of appearance."""
    return list(dict.fromkeys(str(row[field]) for row in data))


def color(known: dict[str, palette.Look], data: Iterable[Row], *, legend: bool = True) -> alt.Color:
    """Color by variant, the same in all charts."""
    order, colors, _, _ = palette.domain(names(data), known)
    key: dict[str, Any] = {} if legend else {"legend": None}
    return alt.Color("variant:N", scale=alt.Scale(domain=order, range=colors), title=None, **key)


def shape(known: dict[str, palette.Look], data: Iterable[Row]) -> alt.Shape:
    """Shape by variant; shares one legend with `color`."""
    order, _, shapes, _ = palette.domain(names(data), known)
    return alt.Shape("variant:N", scale=alt.Scale(domain=order, range=shapes), title=None)


def fixed(field: str, looks: dict[str, str], *, legend: bool = True) -> alt.Color:
    """Color by another field than the variant, with these colors."""
    key: dict[str, Any] = {} if legend else {"legend": None}
    scale = alt.Scale(domain=list(looks), range=list(looks.values()))
    return alt.Color(f"{field}:N", scale=scale, title=None, **key)


def counts_axis(field: str, title: str, values: Sequence[int]) -> alt.X:
    """An axis with one tick per value; logarithmic if the values are far apart."""
    ticks = sorted(set(values))
    wide = ticks[-1] >= 16 * ticks[0]
    kind = alt.Scale(type="log", base=2, nice=False, padding=14)
    scale = kind if wide else alt.Scale(zero=False, nice=False, padding=14)
    return alt.X(f"{field}:Q", title=title, scale=scale, axis=alt.Axis(values=ticks, format="d"))


def batch_axis(values: Sequence[float], title: str = "batch") -> alt.X:
    """A logarithmic axis of batches."""
    ticks = sorted(set(values))
    scale = alt.Scale(type="log", base=2, nice=False, padding=14)
    return alt.X("batch:Q", title=title, scale=scale, axis=alt.Axis(values=ticks, format=",d"))


def tips(*fields: tuple[str, str] | tuple[str, str, str]) -> list[alt.Tooltip]:
    """Tooltips from pairs such as `("workers:Q", "workers")`, with an optional number format."""
    return [
        alt.Tooltip(field[0], title=field[1], format=field[2] if len(field) == 3 else alt.Undefined)
        for field in fields
    ]


RUN = ("run:N", "run")


def short(run: str) -> str:
    """The name of a run's folder, without its path."""
    return run.rstrip("/").rpartition("/")[2]


def runs(folders: Sequence[str]) -> str:
    """`mnist-mlp-7f3a2b1c09de and 2 more`."""
    first = short(folders[0]) if folders else ""
    return first if len(folders) < 2 else f"{first} and {len(folders) - 1} more"


def sentence(parts: Sequence[str]) -> str:
    """Join sentences, one per line, without empty ones."""
    return "\n".join(part for part in parts if part)


def place(variant: str, workers: int, threads: int = 1) -> str:
    """The name of a row: `allreduce · 2 workers`, `single · 2 threads`."""
    if variant == ONE_WORKER:
        return f"{variant} · {formatting.plural(threads, 'thread')}"
    more = f" x {threads} threads" if threads > 1 else ""
    return f"{variant} · {formatting.plural(workers, 'worker')}{more}"


def spoken(variant: str, workers: int, threads: int = 1) -> str:
    """`allreduce with 2 workers`, for use in a sentence."""
    if variant == ONE_WORKER:
        return f"{variant} with {formatting.plural(threads, 'thread')}"
    return f"{variant} with {formatting.plural(workers, 'worker')}"


def many(title: str, field: str) -> alt.X:
    """An axis of large numbers: `0`, `50k`, `100k`."""
    short_ = "datum.value == 0 ? '0' : format(datum.value, '~s')"
    return alt.X(f"{field}:Q", title=title, axis=alt.Axis(labelExpr=short_, tickCount=6))


# `500 ms`, `1.5 s`, `20 min`: d3's `500m` would be read as minutes
TIME_LABELS = (
    "datum.value == 0 ? '0' : abs(datum.value) < 1 ? format(1000 * datum.value, '~g') + ' ms' : "
    "abs(datum.value) < 600 ? format(datum.value, '~g') + ' s' : format(datum.value / 60, '~g') + ' min'"
)


def time_axis(**more: Any) -> alt.Axis:
    """An axis of seconds whose labels have units."""
    return alt.Axis(labelExpr=TIME_LABELS, **({"tickCount": 6} | more))


def brief_time(seconds: float) -> str:
    """A time with two digits for the cell of a map: `73 ms`, `0.45 s`, `7.9 s`, `39 s`, `12 min`."""
    if seconds < 0.0995:
        return formatting.duration(seconds)
    if seconds < 0.995:
        return f"{seconds:.2f} s"
    return formatting.duration(seconds) if seconds < 600 else f"{seconds / 60:.0f} min"
