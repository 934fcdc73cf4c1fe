"""`manyhands verify`: check that a strategy is exact by comparing a few steps with those of `single`."""

from __future__ import annotations

import json as json_
import sys
from typing import Annotated, Any

import typer

from manyhands.cli.flags import RUN, WHERE, given, settings, strategy_flags, with_flags
from manyhands.core.registry.strategies import DATA_PARALLEL
from manyhands.runs.defaults import UNEVEN

EXAMPLES = """Examples:

manyhands verify mnist-mlp --strategy allreduce --workers 3

manyhands verify mnist-resnet --workers 2 --transport torch --sync-batchnorm

manyhands verify mnist-cnn --workers 2 --transport mpi --json"""


@with_flags(
    settings(
        "recipe",
        "lr_schedule",
        "seed",
        "batch",
        "accumulate",
        "drop_last",
        "sync_batchnorm",
        "strategy",
        "transport",
        "launcher",
        defaults={"strategy": DATA_PARALLEL, "batch": UNEVEN},
    ),
    strategy_flags(),
)
def verify(
    task: Annotated[str, typer.Argument(metavar="TASK", help="A task, or FILE.py:NAME.")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Option of the task, recipe.KEY=VALUE or strategy.KEY=VALUE. Repeatable.",
            rich_help_panel=RUN,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to compare.", min=1, max=10_000, rich_help_panel=RUN)] = 5,
    workers: Annotated[int, typer.Option(help="Number of workers.", rich_help_panel=WHERE)] = 2,
    json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
    **flags: Any,
) -> None:
    """Train a few steps with single and with a strategy and compare every tensor (exit code 1: differs)."""
    from manyhands.cli.train import parse_set
    from manyhands.records.spec import RunSpec
    from manyhands.runs.defaults import fill_in, leads
    from manyhands.runs.verify import compare

    options, recipe_options, strategy_options = parse_set(set_ or [])
    chosen, of_strategy = given(flags)
    filled = fill_in({**chosen, "workers": workers, "strategy_options": strategy_options | of_strategy})
    spec = RunSpec.of(task=task, options=options, recipe_options=recipe_options, threads=1, **filled)
    verdict = compare(spec, steps, lambda text: print(text, file=sys.stderr))
    if leads():
        print(json_.dumps(verdict.to_dict(), indent=2) if json else "\n".join(verdict.lines()))
    if not verdict.exact:
        raise typer.Exit(1)
