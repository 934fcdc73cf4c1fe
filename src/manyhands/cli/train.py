"""`manyhands train`: train a task, or continue a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from manyhands.cli.flags import OUTPUT, RUN, given, settings, strategy_flags, with_flags
from manyhands.core import formatting
from manyhands.core.errors import UsageError, cut, shown

EXAMPLES = """Examples:

manyhands train mnist-cnn --batch 512 --epochs 3

manyhands train mnist-cnn --workers 2

torchrun --nproc-per-node 2 -m manyhands train mnist-cnn

mpirun -n 4 manyhands train mnist-cnn --strategy average --every 16

manyhands train mnist-cnn --strategy server --workers 2 --bound 4

manyhands train mnist-resnet --strategy pipeline --stages 2 --workers 4

manyhands train blood-vgg19 --memory 2GB

manyhands train mnist-cnn --set width=2 --set recipe.warmup=1

manyhands train my_task.py:flowers --lr 0.05 --json

manyhands train --resume runs/mnist-cnn-7f3a2b1c09de"""


@with_flags(settings(), strategy_flags())
def train(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help="A task (`manyhands list tasks`), FILE.py:NAME, or with --resume a run's folder.",
        ),
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Option of the task, recipe.KEY=VALUE or strategy.KEY=VALUE. Repeatable.",
            rich_help_panel=RUN,
        ),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(help="Learning rate per 256 samples; short for --set recipe.lr=.", rich_help_panel=RUN),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder. [default: runs/TASK-ID]", rich_help_panel=OUTPUT)
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue the run in TASK, --out or runs/TASK-ID.", rich_help_panel=OUTPUT
        ),
    ] = False,
    allow_changes: Annotated[
        bool,
        typer.Option("--allow-changes", help="Continue although settings differ.", rich_help_panel=OUTPUT),
    ] = False,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust",
            help="With --resume: import the task file of a run that you did not start.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    track: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="tensorboard or mlflow. Repeatable.", rich_help_panel=OUTPUT),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing but errors.", rich_help_panel=OUTPUT)
    ] = False,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print the record as JSON on standard output.", rich_help_panel=OUTPUT),
    ] = False,
    **flags: Any,
) -> None:
    """Train a task and write a run folder with its record, model and checkpoints.

    `manyhands list STRATEGY` explains the options of one strategy.
    """
    from manyhands.runs.defaults import leads
    from manyhands.runs.train import train as run

    options, recipe_options, strategy_options = parse_set(set_ or [])
    chosen, of_strategy = given(flags)
    if "workers" in chosen:
        chosen["workers"] = count_of(chosen["workers"])
    tables: dict[str, Any] = {
        "options": options,
        "recipe_options": recipe_options,
        "strategy_options": strategy_options | of_strategy,
    }
    record = run(
        task,
        lr=lr,
        out=out,
        resume=resume,
        allow_changes=allow_changes,
        trust=trust,
        quiet=quiet,
        track=track or [],
        **chosen,
        **{name: table for name, table in tables.items() if table},
    )
    if json and leads():
        print(formatting.json_printed(record.model_dump_json(indent=2)))


def count_of(workers: str) -> int | str:
    """Parse the number of workers, such as `2`, or `auto`."""
    if workers == "auto":
        return workers
    try:
        return int(workers)
    except ValueError:
        raise UsageError(f"--workers takes a whole number or auto, got {shown(workers)}") from None


def parse_set(pairs: list[str]) -> tuple[dict[str, str], dict[str, str], dict[str, Any]]:
    """Parse --set into options of the task (`width=2`), the recipe (`recipe.lr=1`) and the strategy."""
    found: dict[str, dict[str, Any]] = {"": {}, "recipe": {}, "strategy": {}}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--set takes KEY=VALUE, got {shown(pair)}")
        axis, dot, option = name.partition(".")
        if not dot:
            axis, option = "", name
        elif axis not in found:
            raise UsageError(
                f"--set {cut(pair)}: only options of the task (KEY), of the recipe (recipe.KEY) and of the "
                "strategy (strategy.KEY) can be set"
            )
        found[axis][option] = value
    return found[""], found["recipe"], found["strategy"]
