"""The table of all runs: one row per run; a click on a heading sorts it."""

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


def _text(name: str) -> Callable[[Row], str]:
    return lambda row: str(row.get(name) or "")


def _score(row: Row) -> str:
    value = row.get("metric")
    return formatting.score(
        value if isinstance(value, float) else None, str(row.get("metric_name") or "accuracy")
    ).replace("-", "–")


COLUMNS = (
    Column("task", _text("task"), number=False),
    Column("strategy", _text("variant"), number=False),
    Column("workers", _as("workers", ",.0f")),
    Column("threads", _as("threads", ",.0f")),
    Column("batch", _as("batch", ",.0f")),
    Column("samples/s", _as("throughput", ",.0f")),
    Column("speed-up", _as("speed_up", ".2f")),
    Column("efficiency %", _times("efficiency", 100, ".0f")),
    Column("s to target", _as("target_seconds", ",.1f")),
    Column("steps to target", _as("target_steps", ",.0f")),
    Column("metric", _score),
    Column("ms per step", _times("step_seconds", 1000, ",.2f")),
    Column("MB per step", _times("bytes_per_step", 1e-6, ",.2f")),
    Column("memory MB", _times("memory", 1e-6, ",.0f")),
    Column("recipe", _text("recipe"), number=False),
    Column("lr", _as("lr", ".4g")),
    Column("seed", _as("seed", ".0f")),
    Column("verdict", _text("verdict"), number=False),
)


def runs(findings: Findings, link: Callable[[str], str]) -> str:
    """Return the section with the first thousand runs; all runs are in results.csv."""
    rows = findings.rows[:MOST]
    shown = [column for column in COLUMNS if any(column.show(row) not in ("–", "", "0.00") for row in rows)]
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
    return (
        f'<section id="runs"><h2>All runs</h2><p class="reading">Click a heading to sort. {note} '
        f'<a href="results.csv">results.csv</a>.{against}</p>'
        '<div class="scroll" tabindex="0"><table class="sortable">'
        f"<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div></section>"
    )


def _kind(column: Column) -> str:
    return ' class="n"' if column.number else ""


def _line(row: Row, shown: list[Column], link: Callable[[str], str]) -> str:
    cells = "".join(f"<td{_kind(column)}>{escape(column.show(row))}</td>" for column in shown)
    run = str(row["run"])
    name = escape(run.rstrip("/").rpartition("/")[2])
    bad = ' class="bad"' if row.get("status") in ("diverged", "interrupted") else ""
    variant = escape(str(row["variant"]), quote=True)
    way = f'<a href="{escape(link(run), quote=True)}">{name}</a>'
    return f'<tr{bad} data-variant="{variant}">{cells}<td>{way}</td></tr>'
