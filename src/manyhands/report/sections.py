"""The sections of the page as HTML: numbers link to their runs, charts have text alternatives."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from manyhands.analysis import groups, pairs
from manyhands.claims import Settled
from manyhands.core import formatting
from manyhands.core.statistics import NOISY
from manyhands.records.study_results import Without
from manyhands.report import palette, repeat
from manyhands.report.figure import Chart, Figure
from manyhands.report.findings import Findings
from manyhands.report.headline import headlines

MOST_REASONS, MOST_NAMES, MOST_VERDICTS, MOST_POINTS = 40, 12, 10, 9


class Shown(NamedTuple):
    """The folder of the page, and whether it contains pictures."""

    folder: Path
    pictured: bool


def text(words_: object) -> str:
    """Escape a text for HTML, also within quotes."""
    return escape(str(words_), quote=True)


def prose(words_: str) -> str:
    """Escape a sentence for HTML, with no line break between a number and its unit."""
    return formatting.together(text(words_))


def upper(sentence: str) -> str:
    """Capitalize a sentence, unless it begins with a name such as `mnist-mlp`."""
    first = sentence.split(" ", 1)[0].rstrip(",:;")
    return sentence[:1].upper() + sentence[1:] if first.isalpha() else sentence


def sentences(lines: str) -> str:
    """One paragraph per line; the text before a colon is bold."""
    html = []
    for line in lines.splitlines():
        about, colon, rest = line.partition(": ")
        known = f"<b>{prose(about)}</b>: {prose(rest)}" if colon else prose(line)
        html.append(f'<p class="see">{known}</p>')
    return "".join(html)


def marked(line: str) -> str:
    """Escape a text and show parts in backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", prose(line))


def facts(findings: Findings) -> str:
    """What was run, where and when, in one line."""
    records = findings.records
    here = records[0].environment
    hosts = {record.environment.host for record in records}
    where = f"{here.cores} cores of {here.cpu}" if len(hosts) == 1 else formatting.plural(len(hosts), "host")
    began = min(record.environment.started for record in records)[:16].replace("T", " ")
    took = sum(record.seconds for record in records if record.timed)
    several = [
        formatting.plural(len(records), "run"),
        formatting.plural(len({record.spec.task for record in records}), "task"),
        formatting.plural(len(findings.variants), "strategy", "strategies"),
    ]
    parts = [
        *([] if findings.run else several),
        where,
        f"{formatting.duration(took)} of {'training' if findings.run else 'timed runs'}"
        if took
        else "nothing was timed",
        f"started {began}",
    ]
    return text(" · ".join(parts))


def claim(settled: Settled) -> str:
    """A claim that the study tests, and its verdict."""
    said, found = settled
    name = text(said.name)
    kind = {True: "holds", False: "fails", None: "open"}[found.holds]
    rows = f"<details><summary>Numbers</summary>{grid(found.table)}</details>" if found.table else ""
    points = "".join(f"<li>{text(upper(point))}</li>" for point in found.points[:MOST_POINTS])
    if (more := len(found.points) - MOST_POINTS) > 0:
        points += f"<li>and {more} more, under Numbers</li>"
    beside = f"<p>{text(found.beside)}</p>" if found.beside else ""
    return (
        f'<section class="claim {kind}" id="claim-{name}" aria-label="The claim {name}">'
        f"<blockquote>{text(said.statement)} <cite>{text(said.source)}</cite></blockquote>"
        f'<p class="verdict">{text(upper(found.verdict))}</p><ul>{points}</ul>{beside}{rows}</section>'
    )


def grid(rows: Sequence[dict[str, object]]) -> str:
    """A table of plain values."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f'<th scope="col">{text(name.replace("_", " "))}</th>' for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{text(_plain(row.get(name)))}</td>" for name in names) + "</tr>"
        for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _plain(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def answer(findings: Findings) -> str:
    """The answer of each task: the first sentences in large letters, the others below as details."""
    html = []
    for each in headlines(findings):
        first = " ".join(upper(line) for line in each.leading)
        html.append(f'<p class="lead">{marked(first)}</p>')
        if each.details:
            items = "".join(f"<li>{marked(upper(line))}</li>" for line in each.details)
            html.append(f"<ul>{items}</ul>")
    return "\n".join(html)


def strategies(findings: Findings) -> str:
    """One checkbox per strategy, to filter all charts and the table of runs."""
    if len(findings.variants) < 2:
        return ""
    boxes = "".join(
        f'<label style="--look: {palette.VARIABLES.get(look.color, look.color)}"><input type="checkbox" '
        f'value="{text(name)}" checked autocomplete="off"><span class="swatch" aria-hidden="true"></span>'
        f"{text(name)}</label>"
        for name, look in findings.looks.items()
    )
    name = '<span class="name">show</span>'
    return f'<div class="filter" role="group" aria-label="Strategies shown">{name}{boxes}</div>'


def title(findings: Findings) -> tuple[str, str]:
    """What the page is about, `study` or `run`, and its title."""
    results = findings.results
    if findings.run is None or results.title != results.name:
        return "study" if findings.run is None else "run", results.title
    return "run", f"{groups.task_name(findings.run)} · {groups.title(findings.run)}"


def contents(charts: Iterable[tuple[str, str]], *, judged: bool, alone: bool = False) -> str:
    """Links to all sections."""
    more = [("verdicts", "Verdicts")] if judged else []
    more += [("runs", "Numbers")] if alone else [("runs", "All runs"), ("missing", "Missing")]
    more += [("machine", "The machine"), ("repeat", "Reproduce")]
    links = "".join(f'<a href="#{name}">{text(heading)}</a> ' for name, heading in [*charts, *more])
    return f'<nav class="contents" aria-label="Contents">{links}</nav>'


def chart(of: Chart, drawn: Figure, first: int, show: Shown) -> str:
    """A section with heading, sentence and figure."""
    return (
        f'<section class="chart-section" id="{of.name}"><h2>{text(of.heading)}</h2>'
        f"{sentences(drawn.sentence)}{figure(of, drawn, first, show)}</section>"
    )


def opening(of: Chart, drawn: Figure, first: int, show: Shown, *, told: bool) -> str:
    """The figure next to the answer, with its sentence unless the answer already says it (`told`)."""
    words_ = "" if told else sentences(drawn.sentence)
    return words_ + figure(of, drawn, first, show)


def figure(of: Chart, drawn: Figure, first: int, show: Shown) -> str:
    """The panels with text alternatives and their numbers; pictures if JavaScript is off."""
    panels = []
    for number, panel in enumerate(drawn.panels, first):
        only = "only" if len(drawn.panels) == 1 else ""
        wide = "wide" if panel.wide else ""
        title = f"<h3>{text(panel.title)}</h3>" if panel.title else ""
        title += f'<p class="note">{text(panel.note)}</p>' if panel.note else ""
        height = panel.height if not panel.step else panel.step * len(_bands(panel.data["rows"])) + 40
        panels.append(
            f'<div class="panel {wide} {only}">{title}'
            f'<div class="chart" role="img" aria-label="{text(panel.text)}" data-panel="{number}" '
            f'style="min-height: {height}px"></div>'
            f'<details class="numbers" data-panel="{number}"><summary>Numbers</summary></details></div>'
        )
    left = f'<p class="left">{text(drawn.left_out)}</p>' if drawn.left_out else ""
    links = ""
    if show.pictured:
        links = f' <a href="charts/{of.name}.png">PNG</a> <a href="charts/{of.name}.svg">SVG</a>'
        image = f'<img src="charts/{of.name}.svg" alt="{text(drawn.sentence)}" style="max-width:100%">'
        fallback = f"<noscript>{image}</noscript>"
    else:
        fallback = "<noscript>The charts need JavaScript; the tables below do not.</noscript>"
    return (
        f'<figure data-chart="{of.name}"><p class="reading">{text(of.reading)}{links}</p>'
        f'<div class="panels">{"".join(panels)}</div>{fallback}{left}</figure>'
    )


def _bands(rows: Sequence[Any]) -> set[str]:
    """The names of a panel's bands."""
    return {str(row.get("title", row.get("place", row.get("rank", "")))) for row in rows}


def verdicts(findings: Findings) -> str:
    """The verdicts on the study, the largest loss first."""
    found = findings.verdicts
    if not found:
        return ""
    items = [f"<li>{_lost(each.lost)}<span>{marked(upper(each.text))}</span></li>" for each in found[:200]]
    more, rest = "", items[MOST_VERDICTS:]
    if rest:
        more = (
            f'<details class="more"><summary>{len(rest)} more</summary>'
            f'<ul class="verdicts">{"".join(rest)}</ul></details>'
        )
    return (
        '<section id="verdicts"><h2>Verdicts</h2><p class="reading">What holds these runs back, and the '
        'share of a step that would be gained without it.</p><ul class="verdicts">'
        f"{''.join(items[:MOST_VERDICTS])}</ul>{more}</section>"
    )


def _lost(share: float) -> str:
    if share <= 0:
        return '<span class="lost">remark</span>'
    width = max(2, min(100, round(100 * share)))
    meter = f'<span class="meter"><i style="width:{width}%"></i></span>'
    return f'<span class="lost"><b>{formatting.percent(share)}</b>{meter}</span>'


def runs(findings: Findings, show: Shown) -> str:
    """The table of all runs; see `tables`."""
    from manyhands.report import tables

    return tables.runs(findings, link=lambda run: _link(run, show.folder))


def _link(run: str, folder: Path) -> str:
    """The link from the page to a run's result: always a path, even if a run is named `javascript:...`."""
    path = Path(os.path.relpath(Path(run) / "result.json", folder)).as_posix()
    return "./" + quote(path.removeprefix("/"), safe="/")


def missing(findings: Findings) -> str:
    """Cells that failed or were excluded, left out, repeated or noisy, and why."""
    if findings.run is not None:
        return ""
    results = findings.results
    noisy = [
        f"{record.run.rpartition('/')[2]}: the machine was {formatting.percent(record.machine_noise)} slower "
        "than in a good moment"
        for record in results.records
        if record.machine_noise is not None and record.machine_noise > NOISY and record.timed
    ]
    again = [
        f"{record.run.rpartition('/')[2]}: measured under heavy noise, and repeated"
        for record in results.repeated
    ]
    unfinished = [
        f"{r.run.rpartition('/')[2]}: {r.message or r.status}"
        for r in results.records
        if r.status in ("diverged", "interrupted")
    ]
    parts = [
        _reasons("Failed", [_why(each) for each in results.failed]),
        _reasons("Diverged or interrupted", unfinished),
        _reasons("Excluded: cannot work", [_why(each) for each in results.excluded]),
        _reasons("Left out", [_why(each) for each in results.left]),
        _reasons("Repeated because of noise", again),
        _reasons("Still noisy", noisy),
    ]
    body = "".join(parts) or "<p>Nothing is missing: every cell of this study ran to its end.</p>"
    return f'<section id="missing"><h2>What is missing or uncertain</h2>{body}{_quiet(findings)}</section>'


def _quiet(findings: Findings) -> str:
    """How much the machine varied, where that was measured, and nothing was said of it before."""
    if findings.lanes:
        varied = {
            _task_of(findings, lane): pairs.variation(findings.results.blocks, lane)
            for lane in findings.lanes
        }
        listed = ", ".join(f"{formatting.percent(share)} ({task})" for task, share in varied.items())
        busy = max(varied.values()) > NOISY
        advice = " That is much: close what else runs, and measure again." if busy else ""
        said = f"While pairs were measured, the machine varied by {listed}; the intervals include that."
        return f"<p>{text(said + advice)}</p>"
    known = [record.machine_noise for record in findings.records if record.machine_noise is not None]
    if known and max(known) <= NOISY:
        return "<p>The machine was quiet.</p>"
    return ""


def _task_of(findings: Findings, lane: pairs.Lane) -> str:
    record = findings.by_cell.get(lane.baseline)
    return groups.task_name(record) if record else lane.baseline


def _why(each: Without) -> str:
    spec = each.cell.spec
    batch = f", batch {spec.batch:,}" if spec.batch else ""
    return f"{spec.task}, {spec.strategy}, {formatting.plural(spec.workers, 'worker')}{batch}: {each.reason}"


def _reasons(heading: str, found: list[str]) -> str:
    if not found:
        return ""
    by_reason: dict[str, list[str]] = {}
    for line in found:
        name, _, reason = line.partition(": ")
        by_reason.setdefault(reason, []).append(name)
    items = "".join(
        f"<li>{text(upper(reason))}: {_names(names)}</li>"
        for reason, names in list(by_reason.items())[:MOST_REASONS]
    )
    left = len(by_reason) - MOST_REASONS
    more = f'<p class="more">and {left:,} more reasons</p>' if left > 0 else ""
    return f'<h3>{text(heading)} ({len(found):,})</h3><ul class="reasons">{items}</ul>{more}'


def _names(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES:,} more" if len(names) > MOST_NAMES else ""
    return "; ".join(f"<b>{text(name)}</b>" for name in names[:MOST_NAMES]) + more


def machine(findings: Findings) -> str:
    """The machines that the runs used."""
    machines = {
        (e.host, e.cpu, e.cores, e.torch, e.python): e for e in (r.environment for r in findings.records)
    }
    html = []
    for here in list(machines.values())[:6]:
        facts = {
            "processor": here.cpu,
            "cores": str(here.cores),
            "memory": f"{here.memory / 2**30:.0f} GiB",
            "device": here.device,
            "host": here.host,
            "system": here.platform,
            "versions": f"manyhands {here.manyhands}, torch {here.torch}, numpy {here.numpy}, "
            f"python {here.python}",
            "commit": here.commit or "not in a repository",
            "started": here.started,
        }
        html.append(
            "<dl>"
            + "".join(f"<dt>{name}</dt><dd>{text(value)}</dd>" for name, value in facts.items())
            + "</dl>"
        )
    return f'<section id="machine"><h2>The machine</h2>{"".join(html)}</section>'


def commands(findings: Findings) -> str:
    """The commands that repeat the study, its best runs, and this page."""
    results = findings.results
    html = []
    if again := repeat.study(results):
        html.append(f"<h3>The study</h3><pre><code>{text(again)}</code></pre>")
    best = [repeat.train(findings.run)] if findings.run else []
    for each in findings.answers if findings.run is None else []:
        for found in (each.advised, each.cheapest):
            if found is None:
                continue
            learned = findings.by_run.get(found.runs[0]) if found.runs else None
            record = findings.by_cell.get(found.cell) if found.cell else learned
            if record is not None:
                best.append(repeat.train(record, None if learned is None or learned.paired else learned))
    if best:
        lines = "\n".join(dict.fromkeys(best))
        heading = "The run" if findings.run else "The runs that the answer names"
        html.append(f"<h3>{heading}</h3><pre><code>{text(lines)}</code></pre>")
    html.append(f"<h3>This page</h3><pre><code>{text(repeat.report(results))}</code></pre>")
    return f'<section id="repeat"><h2>Reproduce</h2>{"".join(html)}</section>'
