"""`manyhands report`: draw the report of a study, or of any folder of runs, without torch."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer

from manyhands.core import formatting

EXAMPLES = """Examples:

manyhands report results/default

manyhands report runs --out /tmp/page --no-pictures"""


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A study's folder, or any folder that holds runs.")
    ],
    out: Annotated[Path | None, typer.Option(help="Where the report goes. [default: DIR]")] = None,
    pictures: Annotated[
        bool, typer.Option("--pictures/--no-pictures", help="Every chart as PNG and SVG too.")
    ] = True,
    json: Annotated[
        bool, typer.Option("--json", help="Print the answers and the path as JSON on standard output.")
    ] = False,
) -> None:
    """Draw a study's report from its records: report.html, results.csv and the charts."""
    from manyhands.analysis.answer import answers
    from manyhands.core.atomic_files import usable
    from manyhands.records.study_results import StudyFolder
    from manyhands.report.page import draw

    results = StudyFolder(folder).read()
    page = draw(results, None if out is None else usable(out), pictures=pictures)
    found = answers(results)
    if json:
        texts = {answer.task: answer.text for answer in found}
        print(json_format.dumps({"report": str(page), "answers": texts}, indent=2))
        return
    for answer in found:
        print(formatting.printed(f"answer: {answer.text}"))
    print(formatting.line(f"report: {page}"))
