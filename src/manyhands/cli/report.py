"""`manyhands report`: draw the report of a study, of any folder of runs, or of one run, without torch."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer

from manyhands.core import formatting

EXAMPLES = """Examples:

manyhands report results/default

manyhands report runs/first

manyhands report runs --out /tmp/page --no-pictures"""


def report(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="The folder of a study or of a run, or one that holds runs."),
    ],
    out: Annotated[Path | None, typer.Option(help="Where the report goes. [default: DIR]")] = None,
    pictures: Annotated[
        bool, typer.Option("--pictures/--no-pictures", help="Every chart as PNG and SVG too.")
    ] = True,
    json: Annotated[
        bool, typer.Option("--json", help="Print the answers and the path as JSON on standard output.")
    ] = False,
) -> None:
    """Draw the report of a study or of a run from its records: report.html, results.csv and the charts."""
    from manyhands.core.atomic_files import usable
    from manyhands.report.findings import Findings
    from manyhands.report.headline import headlines
    from manyhands.report.page import draw
    from manyhands.report.sources import read

    results = read(folder)
    page = draw(results, None if out is None else usable(out), pictures=pictures)
    findings = Findings(results)
    found = headlines(findings)
    if json:
        texts = {each.task: each.text for each in found}
        print(json_format.dumps({"report": str(page), "answers": texts}, indent=2))
        return
    for each in found:
        print(formatting.printed(f"{'answer' if findings.run is None else 'run'}: {each.text}"))
    print(formatting.line(f"report: {page}"))
