"""`manyhands verify`: is a strategy exact? A few steps beside `single`, compared tensor by tensor."""

from __future__ import annotations

import json as json_
import sys
from typing import Annotated, Any

import typer

EXAMPLES = """Examples:

manyhands verify mnist-mlp --strategy allreduce --workers 3

manyhands verify mnist-resnet --workers 2 --transport torch --sync-batchnorm

manyhands verify mnist-cnn --workers 2 --transport mpi --json"""

UNEVEN = 65  # samples: a batch that does not divide is the harder one to get right


def verify(
    task: Annotated[str, typer.Argument(metavar="TASK", help="A task, or FILE.py:NAME.")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="An option of the task, recipe.KEY=VALUE or strategy.KEY=VALUE.",
        ),
    ] = None,
    strategy: Annotated[str | None, typer.Option(help="To compare with single. [default: allreduce]")] = None,
    workers: Annotated[int, typer.Option(help="How many workers.")] = 2,
    transport: Annotated[str | None, typer.Option(help="shm, torch or mpi. [default: shm]")] = None,
    launcher: Annotated[str | None, typer.Option(help="local, env or mpi. [default: local]")] = None,
    steps: Annotated[int, typer.Option(help="Steps to compare.", min=1, max=10_000)] = 5,
    batch: Annotated[int, typer.Option(help="Samples a step, over all workers.")] = UNEVEN,
    accumulate: Annotated[int, typer.Option(help="Micro-batches a worker and step.")] = 1,
    recipe: Annotated[str | None, typer.Option(help="[default: the task's]")] = None,
    seed: Annotated[int, typer.Option(help="Of parameters and sample order.")] = 0,
    sync_batchnorm: Annotated[
        bool, typer.Option("--sync-batchnorm", help="Batch norm over the global batch.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Train a few steps with single and with a strategy and compare every tensor (exit code 1: differs)."""
    from manyhands.cli.train import parse_set
    from manyhands.records.spec import RunSpec
    from manyhands.runs.defaults import arrange, leads
    from manyhands.runs.verify import verify as compare

    options, recipe_options, strategy_options = parse_set(set_ or [])
    settings: dict[str, Any] = arrange(
        {
            "strategy": strategy or "allreduce",
            "strategy_options": strategy_options,
            "workers": workers,
            "transport": transport,
            "launcher": launcher,
        }
    )
    spec = RunSpec.of(
        task=task,
        options=options,
        recipe=recipe,
        recipe_options=recipe_options,
        batch=batch,
        accumulate=accumulate,
        seed=seed,
        sync_batchnorm=sync_batchnorm,
        threads=1,
        **settings,
    )
    verdict = compare(spec, steps, lambda text: print(text, file=sys.stderr))
    if leads():
        print(json_.dumps(verdict.to_dict(), indent=2) if json else "\n".join(lines(verdict)))
    if not verdict.exact:
        raise typer.Exit(1)


def lines(verdict: Any) -> list[str]:
    """A table for people: a row a tensor, a column a precision; then the verdict and what it leaves out."""
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
