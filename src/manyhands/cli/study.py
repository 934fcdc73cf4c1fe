"""`manyhands study`: run a grid of runs and compare them."""

from __future__ import annotations

import json as json_format
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands import words

if TYPE_CHECKING:
    from manyhands.study import execute

EXAMPLES = """Examples:

manyhands study studies/default.toml

manyhands study studies/default.toml --out results/mine --json"""


def study(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A study file (TOML).")],
    out: Annotated[Path | None, typer.Option(help="Where the runs go. [default: results/NAME]")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells and stop.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the table.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print the records as JSON on standard output.")
    ] = False,
) -> None:
    """Run every cell of a study that has no result yet, and print the table.

    A study that was stopped goes on where it was when the same command is given again.
    """
    from manyhands import progress
    from manyhands.study import execute, grid, table

    plan = grid.read(file)
    folder = out or Path("results") / plan.name

    def say(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr, flush=True)

    if dry_run:
        for cell in plan.cells:
            print(execute.title(cell))
        return
    say(f"{words.plural(len(plan.cells), 'cell')} · {folder}")
    began = time.monotonic()
    observer = progress.Silent if quiet else progress.for_people
    cells = list(execute.execute(plan, folder, observer, say))
    if json:
        print(json_format.dumps([_json(cell) for cell in cells], indent=2))
    else:
        print("\n" + "\n".join(table.draw(cells)))
        for answer in table.answers(cells):
            print(f"answer: {answer}")
    say(f"{words.duration(time.monotonic() - began)} · {folder}")
    if any(cell.record is None for cell in cells):
        raise typer.Exit(1)


def _json(cell: execute.Cell) -> dict[str, object]:
    if cell.record is None:
        return {"spec": cell.spec.model_dump(mode="json"), "error": cell.message}
    return cell.record.model_dump(mode="json")
