"""The table of all runs: one row per run; a click on a heading sorts it.

What is the same in all runs is said above the table, so that its columns fit.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import NamedTuple

from manyhands.core import formatting
from manyhands.report.findings import Findings

MOST = 1_000  # rows

Row = dict[str, object]


class Column(NamedTuple):
    """A column: its heading, and the text of a row in it."""

    heading: str
    show: Callable[[Row], str]
    number: bool = True
    setting: bool = False  # said once if it is the same in all runs
    kind: str = ""  # of its cells, for the style sheet


def _as(name: str, form: str) -> Callable[[Row], str]:
    """Format the number with this name, or show a dash if there is none."""

    def show(row: Row) -> str:
        value = row.get(name)
        return "–" if not isinstance(value, int | float) else format(value, form)

    return show


def _times(name: str, factor: float, form: str) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        value = row.get(name)
        return "–" if not isinstance(value, int | float) else format(factor * value, form)

    return show


def _seconds(row: Row) -> str:
    """Three digits, also of milliseconds: `0.0731`, `7.92`, `1,234`."""
    value = row.get("target_seconds")
    if not isinstance(value, int | float):
        return "–"
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def _text(name: str) -> Callable[[Row], str]:
    return lambda row: str(row.get(name) or "")


def _score(row: Row) -> str:
    value = row.get("metric")
    return formatting.score(
        value if isinstance(value, float) else None, str(row.get("metric_name") or "accuracy")
    ).replace("-", "–")


COLUMNS = (
    Column("task", _text("task"), number=False, setting=True),
    Column("strategy", _text("variant"), number=False, kind="name"),
    Column("workers", _as("workers", ",.0f"), setting=True),
    Column("threads", _as("threads", ",.0f"), setting=True),
    Column("batch", _as("batch", ",.0f"), setting=True),
    Column("samples/s", _as("throughput", ",.0f")),
    Column("speed-up", _as("speed_up", ".2f")),
    Column("seconds to target", _seconds),
    Column("steps to target", _as("target_steps", ",.0f")),
    Column("metric at the end", _score),
    Column("ms per step", _times("step_seconds", 1000, ",.2f")),
    Column("memory MB", _times("memory", 1e-6, ",.0f")),
    Column("recipe", _text("recipe"), number=False, setting=True, kind="wrap"),
    Column("lr", _as("lr", ".4g"), setting=True),
    Column("seed", _as("seed", ".0f"), setting=True),
    Column("verdict", _text("verdict"), number=False, kind="wrap"),
)


def _split(rows: list[Row]) -> tuple[list[Column], list[Column]]:
    """The columns of the table, and those that are said once because all runs have the same value."""
    kept: list[Column] = []
    same: list[Column] = []
    for column in COLUMNS:
        texts = {column.show(row) for row in rows}
        if texts <= {"–", "", "0.00"}:
            continue
        (same if column.setting and len(texts) == 1 and len(rows) > 1 else kept).append(column)
    return kept, same


def runs(findings: Findings, link: Callable[[str], str]) -> str:
    """Return the section with the first thousand runs; all runs are in results.csv."""
    rows = findings.rows[:MOST]
    if findings.run is not None:
        return _one(rows[0], link)
    shown, same = _split(rows)
    head = "".join(
        f'<th scope="col"{_kind(column)}><button type="button">{escape(column.heading)}</button></th>'
        for column in [*shown, Column("run", _text("run"), number=False)]
    )
    body = "\n".join(_line(row, shown, link) for row in rows)
    left = len(findings.rows) - len(rows)
    note = (
        f"The first {MOST:,} of {len(findings.rows):,} runs; all are in"
        if left > 0
        else "The same table with more columns is in"
    )
    baseline = sorted({str(row["baseline"]) for row in rows if row.get("baseline")})
    against = f" Speed-ups are over {escape(' or '.join(baseline))}." if baseline else ""
    alike = ", ".join(f"{column.heading} {column.show(rows[0])}" for column in same)
    against += f" The same in all runs: {escape(alike)}." if alike else ""
    return (
        f'<section id="runs"><h2>All runs</h2><p class="reading">Click a heading to sort. {note} '
        f'<a href="results.csv">results.csv</a>.{against}</p>'
        '<div class="scroll" tabindex="0"><table class="sortable">'
        f"<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div></section>"
    )


def _one(row: Row, link: Callable[[str], str]) -> str:
    """The numbers of a single run, below each other."""
    pairs = [(column.heading, column.show(row)) for column in COLUMNS]
    shown = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs if value not in ("–", "")
    )
    return (
        f'<section id="runs"><h2>Numbers</h2><dl>{shown}<dt>run</dt><dd>{_way(row, link)}</dd></dl>'
        '<p class="reading">More are in <a href="results.csv">results.csv</a>.</p></section>'
    )


def _way(row: Row, link: Callable[[str], str]) -> str:
    """The name of the run without its task, which has a column; a link to its result."""
    run = str(row["run"])
    name = run.rstrip("/").rpartition("/")[2]
    short = name.removeprefix(f"{str(row['task']).partition(' ')[0]}-")
    return f'<a href="{escape(link(run), quote=True)}" title="{escape(name, quote=True)}">{escape(short)}</a>'


def _kind(column: Column) -> str:
    kind = "n" if column.number else column.kind
    return f' class="{kind}"' if kind else ""


def _line(row: Row, shown: list[Column], link: Callable[[str], str]) -> str:
    cells = "".join(f"<td{_kind(column)}>{escape(column.show(row))}</td>" for column in shown)
    bad = ' class="bad"' if row.get("status") in ("diverged", "interrupted") else ""
    variant = escape(str(row["variant"]), quote=True)
    return f'<tr{bad} data-variant="{variant}">{cells}<td>{_way(row, link)}</td></tr>'
