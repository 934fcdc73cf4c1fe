"""`manyhands claims`: published claims, decided by studies on this machine, and the page about them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.core import formatting

if TYPE_CHECKING:
    from manyhands.claims import Claim
    from manyhands.records.study_results import Results
    from manyhands.study.study_file import Study

EXAMPLES = """Examples:

manyhands claims

manyhands claims run large-batch

manyhands claims run all --quick

manyhands claims write --to docs/claims.md"""

FOLDER = Path("results/claims")
ALL = "all"
QUICK = 300.0  # seconds per claim: the seeds that fit are run, and the same command without --quick continues
WIDTH = 110

app = typer.Typer(
    help="List published claims with their verdicts on this machine, run their studies, and write the page.",
    epilog=EXAMPLES,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_From = Annotated[Path, typer.Option("--from", help="The folder that holds the claims' results.")]


@app.callback(invoke_without_command=True)
def claims(context: typer.Context, from_: _From = FOLDER) -> None:
    """List published claims with their verdicts on this machine, run their studies, and write the page."""
    if context.invoked_subcommand is None:
        _list(from_)


def _list(folder: Path) -> None:
    from manyhands.report.claims_document import judged

    for claim, _, finding in judged(folder):
        verdict = finding.verdict if finding else f"not run yet (about {claim.takes} on two cores)"
        print(formatting.line(f"{claim.name:15} {verdict}"))
        print(formatting.wrapped(claim.statement, WIDTH, first=" " * 16, then=" " * 16))


@app.command("run", epilog=EXAMPLES)
def run(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A claim, or all.")],
    out: Annotated[Path, typer.Option(help="Where the results go, one folder per claim.")] = FOLDER,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Five minutes per claim: a first answer, which may be 'not settled'."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the verdict.")] = False,
) -> None:
    """Run the study of a claim, or of all of them one after the other, and print the verdict.

    Run the same command again to continue a study that was stopped, by you or by --quick.
    """
    from manyhands.claims import CLAIMS
    from manyhands.core.atomic_files import usable
    from manyhands.core.errors import InterruptedRunError, ManyhandsError, unknown

    if name != ALL and name not in CLAIMS:
        raise unknown("claim", name, [*CLAIMS, ALL])
    failed = False
    for each in CLAIMS if name == ALL else [name]:
        try:
            failed |= not _decide(CLAIMS[each], usable(out) / CLAIMS[each].tested_by, quick, quiet)
        except InterruptedRunError:
            raise
        except ManyhandsError as error:
            if name != ALL:
                raise
            print(formatting.printed(f"{each}: error: {error}"), file=sys.stderr)
            failed = True
    if failed:
        raise typer.Exit(1)


def _decide(claim: Claim, folder: Path, quick: bool, quiet: bool) -> bool:
    """Run the study of a claim and print the verdict; False if some of its cells failed."""
    from manyhands.claims import Settled
    from manyhands.core import environment
    from manyhands.study import guarded, view
    from manyhands.study import study_file as files
    from manyhands.study.execute import execute

    plan = files.with_baselines(files.read(files.find(claim.tested_by)))
    jobs = environment.cores()
    if quick:
        plan = first_answer(plan)
        jobs = jobs if all(cell.spec.ranks == 1 for cell in plan.cells) else 1  # in the order of the seeds
    results = execute(plan, folder, view.NoView() if quiet else guarded.Guarded(view.for_people()), jobs)
    _more(results)
    said, verdict = Settled(claim, claim.judge(results)).text.split("\n")
    print(formatting.wrapped(f"{claim.name}: {said}", WIDTH, then="  "))
    print(formatting.wrapped(verdict, WIDTH, first="  ", then="  "))
    left = len(results.left)
    if left:
        print(f"  {formatting.plural(left, 'cell')} left: `manyhands claims run {claim.name}` continues")
    for cell, reason in results.failed:
        print(formatting.line(f"  failed: {cell.key}: {reason}"), file=sys.stderr)
    return not results.failed


def first_answer(plan: Study) -> Study:
    """The same study within a few minutes: whole seeds come first, so that there is something to compare."""
    from dataclasses import replace

    cells = sorted(plan.cells, key=lambda cell: (cell.repeat, cell.spec.seed))
    return replace(plan, cells=cells, budget=min(QUICK, plan.budget or QUICK))


def _more(results: Results) -> None:
    """Run what belongs to a claim besides its study."""
    from manyhands.claims import limit_trial
    from manyhands.claims.offload import OFFLOAD

    if results.claim == OFFLOAD.name and not any(trial.plain for trial in limit_trial.read(results.folder)):
        from manyhands.study.memory_limit import try_limit

        try_limit(results)


@app.command("write", epilog=EXAMPLES)
def write(
    from_: _From = FOLDER,
    to: Annotated[Path, typer.Option(help="The page; its pictures go into a folder beside it.")] = Path(
        "docs/claims.md"
    ),
) -> None:
    """Write the page about all claims from their records, with pictures."""
    from manyhands.core.atomic_files import usable
    from manyhands.core.errors import UsageError
    from manyhands.report.claims_document import judged
    from manyhands.report.claims_document import write as write_page

    found = judged(from_)
    if not any(each.finding for each in found):
        raise UsageError(f"{from_} holds no results of a claim: `manyhands claims run NAME` makes them")
    write_page(found, usable(to))
    done = sum(each.finding is not None for each in found)
    print(formatting.line(f"{to}: {done} of {formatting.plural(len(found), 'claim')} with results"))
