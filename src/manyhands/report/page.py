"""The report: one HTML page that works offline and starts with the answer; pictures and results.csv."""

from __future__ import annotations

import csv
import io
import json
import re
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import vl_convert

from manyhands.claims import settle
from manyhands.core.atomic_files import cannot_write, write_atomically
from manyhands.core.environment import version
from manyhands.core.errors import UsageError
from manyhands.records.study_results import Results
from manyhands.report import palette, pictures, sections
from manyhands.report.charts import CHARTS, CURVES, OPENING
from manyhands.report.figure import Chart, Figure, Panel
from manyhands.report.findings import Findings

_VEGA = "/* vega */"  # replaced by the Vega bundle when that is ready


class _Drawn(NamedTuple):
    chart: Chart
    figure: Figure
    first: int  # the number of its first panel in the page


def draw(
    results: Results,
    out: Path | None = None,
    *,
    pictures: bool = True,
) -> Path:
    """Write report.html, results.csv and charts next to the runs, or into `out`; return the page's path."""
    if not results.records:
        raise UsageError(f"{results.folder} has no run with a result yet, so there is nothing to report")
    folder = out or results.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if pictures and (folder / "charts").is_symlink():  # pictures are written and deleted there
            raise UsageError(f"{folder / 'charts'} is a link: remove it, or choose another --out")
        if pictures:
            (folder / "charts").mkdir(exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    findings = Findings(results)
    page = folder / "report.html"
    # Drawing pictures and bundling Vega is native code: it runs in parallel with Python.
    with ThreadPoolExecutor(2) as pool:
        vega = pool.submit(_vega)
        drawn = _figures(findings)
        submitted = _draw_pictures(pool, folder / "charts", drawn) if pictures else []
        write_atomically(folder / "results.csv", table(findings).encode())
        html = _html(findings, drawn, sections.Shown(folder, pictures))
        write_atomically(page, html.replace(_VEGA, vega.result(), 1).encode())
        for picture in submitted:
            picture.result()
    return page


def _figures(findings: Findings) -> list[_Drawn]:
    drawn: list[_Drawn] = []
    first = 0
    for chart in CHARTS:
        figure = chart.figure(findings)
        if figure is not None:
            drawn.append(_Drawn(chart, figure, first))
            first += len(figure.panels)
    return drawn


def _draw_pictures(pool: Executor, folder: Path, drawn: list[_Drawn]) -> list[Future[None]]:
    """Start drawing all pictures; delete those of an earlier report that no longer apply."""
    names = {each.chart.name for each in drawn}
    for chart in CHARTS:
        if chart.name not in names:
            for kind in ("png", "svg"):
                (folder / f"{chart.name}.{kind}").unlink(missing_ok=True)
    return [
        pool.submit(pictures.write, folder, each.chart.name, each.chart.heading, each.figure)
        for each in drawn
    ]


def table(findings: Findings) -> str:
    """Return the text of results.csv: one row per run."""
    text = io.StringIO()
    columns = list(dict.fromkeys(name for row in findings.rows for name in row))
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(findings.rows)
    return text.getvalue()


def _html(findings: Findings, drawn: list[_Drawn], show: sections.Shown) -> str:
    results = findings.results
    # if nothing was timed there is no best strategy to show, and the page starts with the first chart
    first = CURVES if findings.run else OPENING
    opening = next((each for each in drawn if each.chart is first), drawn[0] if drawn else None)
    others = [each for each in drawn if each is not opening]
    kind, title = sections.title(findings)
    parts = {
        "kind": kind,
        "title": sections.text(title),
        "about": sections.text(results.about),
        "facts": sections.facts(findings),
        "claim": "".join(map(sections.claim, settle(results))),
        "answer": sections.answer(findings)
        + (sections.opening(*opening, show, told=opening.chart is first) if opening else ""),
        "filter": sections.strategies(findings),
        "contents": sections.contents(
            [(each.chart.name, each.chart.heading) for each in others],
            judged=bool(findings.verdicts),
            alone=findings.run is not None,
        ),
        "charts": "\n".join(sections.chart(each.chart, each.figure, each.first, show) for each in others),
        "verdicts": sections.verdicts(findings),
        "runs": sections.runs(findings, show),
        "missing": sections.missing(findings),
        "machine": sections.machine(findings),
        "commands": sections.commands(findings),
        "version": sections.text(version("manyhands") or ""),
        "data": _data(drawn),
        "vega": _VEGA,
        "style": _file("style.css"),
        "script": _file("page.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _file("page.html"))


def _file(name: str) -> str:
    return resources.files("manyhands.report").joinpath(name).read_text("utf-8")


def _vega() -> str:
    """The code of Vega, Vega-Lite and Vega-Embed, once for all charts."""
    bundle = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # the stub lacks the default
    return str(bundle).replace("</script", "<\\/script")


def _data(drawn: list[_Drawn]) -> str:
    config = palette.config(
        ink="var(--ink)",
        quiet="var(--quiet)",
        line="var(--line)",
        paper="var(--paper)",
        background="transparent",
    )
    panels = [_panel(panel) for each in drawn for panel in each.figure.panels]
    content = json.dumps({"config": config, "panels": panels}, separators=(",", ":"), ensure_ascii=False)
    for color, variable in palette.VARIABLES.items():
        content = content.replace(f'"{color}"', f'"{variable}"')
    return content.replace("<", "\\u003c")  # so that no text can end the script


def _panel(panel: Panel) -> dict[str, Any]:
    spec = panel.chart().to_dict(validate=False)
    for name in ("width", "config", "datasets"):
        spec.pop(name, None)
    spec.pop("$schema", None)  # the bundle has one version, and the page contains no addresses
    return {"spec": spec, "data": {name: _columns(rows) for name, rows in panel.data.items()}}


def _columns(rows: list[Any]) -> dict[str, Any]:
    """Column names once, then rows of values: half the size of a list of objects."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return {"columns": columns, "rows": [[row.get(name) for name in columns] for row in rows]}
