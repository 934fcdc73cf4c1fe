"""`manyhands study`: run a grid of runs, compare them, and draw the report."""

from __future__ import annotations

import json as json_format
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.core import environment, formatting
from manyhands.core.errors import UsageError, shown

if TYPE_CHECKING:
    from manyhands.records.study_results import Results

EXAMPLES = """Examples:

manyhands study default

manyhands study default --dry-run

manyhands study my-study.toml --out results/mine

manyhands study studies/default.toml --jobs 2 --json"""

SHOWN = 10  # at most this many reasons are printed


def study(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE_OR_NAME", help="A study file (TOML), or the name of one in studies/."),
    ],
    out: Annotated[Path | None, typer.Option(help="Where the runs go. [default: results/NAME]")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Number of cells to run at a time, if they are not timed. [default: the study's, or 1]",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cells and about how long they take, and stop.")
    ] = False,
    no_report: Annotated[bool, typer.Option("--no-report", help="Draw no report.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only the table and the answer.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print the records as JSON on standard output.")
    ] = False,
) -> None:
    """Run every cell of a study that has no result yet, and print table, answer and the report's path.

    Run the same command again to continue a study that was stopped.
    """
    from manyhands.core.atomic_files import usable
    from manyhands.runs.checks import most_ranks
    from manyhands.study import guarded, preview, view
    from manyhands.study import study_file as files
    from manyhands.study.execute import execute

    if jobs is not None and not 1 <= jobs <= most_ranks():
        raise UsageError(f"--jobs must be from 1 to {most_ranks():,} on this machine, got {shown(jobs)}")
    plan = files.with_baselines(files.read(files.find(file), lambda text: None if quiet else _say(text)))
    jobs = min(plan.jobs, environment.cores()) if jobs is None else jobs
    folder = usable(out or Path("results") / plan.name)
    if dry_run:
        found = preview.preview(plan, folder, jobs)
        lines = [json_format.dumps(preview.to_json(found), indent=2)] if json else preview.draw(found)
        print(formatting.printed("\n".join(lines)))
        return
    table = view.NoView() if quiet else guarded.Guarded(view.for_people())
    results = execute(plan, folder, table, jobs)
    if json:
        print(json_format.dumps(_json(results), indent=2))
    else:
        _print(results)
    if not no_report and results.records:
        _report(results, quiet=json)
    if results.failed:
        raise typer.Exit(1)


def _say(text: str) -> None:
    print(formatting.printed(text), file=sys.stderr, flush=True)


def _print(results: Results) -> None:
    """Print the table, the cells that are not in it and why, and the answer."""
    from manyhands.analysis.answer import answers
    from manyhands.claims import settle
    from manyhands.study.study_state import cell_title
    from manyhands.study.table import draw_all, winners

    found = answers(results)
    wide = shutil.get_terminal_size().columns
    for line in draw_all(results, wide if sys.stdout.isatty() else None, winners(found)):
        print(formatting.line(line))
    if results.excluded:
        print(f"excluded: {formatting.plural(len(results.excluded), 'cell')}")
        for cell, reason in results.excluded[:SHOWN]:
            print(formatting.printed(f"  {cell_title(cell)}: {reason}"))
        if len(results.excluded) > SHOWN:
            print(f"  and {len(results.excluded) - SHOWN} more")
    for reason, count in Counter(reason for _, reason in results.left).items():
        print(formatting.printed(f"left: {formatting.plural(count, 'cell')}: {reason}"))
    width = min(wide, 110) if sys.stdout.isatty() else 10_000
    for answer in found:
        print(formatting.wrapped(f"answer: {answer.text}", width, then=" " * 8))
    for settled in settle(results):
        claim, verdict = settled.text.split("\n")
        print(formatting.wrapped(f"claim: {claim}", width, then=" " * 7))
        print(formatting.wrapped(verdict, width, first=" " * 7, then=" " * 7))


def _report(results: Results, quiet: bool) -> None:
    from manyhands.report.page import draw

    path = draw(results)
    if not quiet:
        print(formatting.line(f"report: {path}"))


def _json(results: Results) -> list[dict[str, Any]]:
    """Return the records, then the cells that have none and why."""
    found = [record.model_dump(mode="json") for record in results.records]
    for what, cells in (("error", results.failed), ("excluded", results.excluded), ("left", results.left)):
        found += [{"spec": cell.spec.model_dump(mode="json"), what: reason} for cell, reason in cells]
    return found
