"""`manyhands verify`: check that a strategy is exact by comparing a few steps with those of `single`."""

from __future__ import annotations

import json as json_
import sys
from typing import Annotated, Any

import typer

from manyhands.cli.flags import RUN, WHERE, given, settings, strategy_flags, with_flags
from manyhands.core.registry.strategies import DATA_PARALLEL

EXAMPLES = """Examples:

manyhands verify mnist-mlp --strategy allreduce --workers 3

manyhands verify mnist-resnet --workers 2 --transport torch --sync-batchnorm

manyhands verify mnist-cnn --workers 2 --transport mpi --json"""

UNEVEN = 65  # samples: a batch that cannot be divided evenly is harder to get right


@with_flags(
    settings(
        "recipe",
        "seed",
        "batch",
        "accumulate",
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
    from manyhands.runs.verify import verify as compare

    options, recipe_options, strategy_options = parse_set(set_ or [])
    chosen, of_strategy = given(flags)
    filled = fill_in({**chosen, "workers": workers, "strategy_options": strategy_options | of_strategy})
    spec = RunSpec.of(task=task, options=options, recipe_options=recipe_options, threads=1, **filled)
    verdict = compare(spec, steps, lambda text: print(text, file=sys.stderr))
    if leads():
        print(json_.dumps(verdict.to_dict(), indent=2) if json else "\n".join(lines(verdict)))
    if not verdict.exact:
        raise typer.Exit(1)


def lines(verdict: Any) -> list[str]:
    """Return a table as text: one row per tensor, one column per precision; then the result and its notes."""
    comparisons = verdict.comparisons
    width = max(len(name) for name in [*comparisons[0].tensors, "largest of all"])
    head = "".join(f"  {comparison.dtype:>9}" for comparison in comparisons)
    rows = [f"{'largest difference in':<{width}}{head}"]
    rows += [
        f"{name:<{width}}" + "".join(f"  {c.tensors[name]:9.1e}" for c in comparisons)
        for name in comparisons[0].tensors
    ]
    rows.append(f"{'losses':<{width}}" + "".join(f"  {c.losses:9.1e}" for c in comparisons))
    rows.append(f"{'largest of all':<{width}}" + "".join(f"  {c.largest:9.1e}" for c in comparisons))
    rows.append(f"{'allowed':<{width}}" + "".join(f"  {c.tolerance:9.1e}" for c in comparisons))
    rows += [f"note: {reason}" for reason in verdict.reasons]
    spec = verdict.spec
    equal = "equals" if verdict.exact else "DIFFERS FROM"
    rows.append(
        f"{spec.strategy} with {spec.workers} workers on {spec.transport} {equal} {comparisons[0].reference} "
        f"after {verdict.steps} steps of {spec.batch} samples"
    )
    return rows
