"""`manyhands train`: train a task, or continue a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from manyhands.errors import UsageError

EXAMPLES = """Examples:

manyhands train mnist-cnn --batch 512 --epochs 3

manyhands train mnist-cnn --workers 2

torchrun --nproc-per-node 2 -m manyhands train mnist-cnn

mpirun -n 2 manyhands train mnist-cnn

manyhands train mnist-cnn --set width=2 --set recipe.warmup=1

manyhands train my_task.py:flowers --lr 0.05 --json

manyhands train --resume runs/mnist-cnn-7f3a2b1c"""


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
            help="An option of the task, or recipe.KEY=VALUE of the recipe; repeatable.",
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(help="How the work is divided. [default: single; allreduce for several workers]"),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(help="How many workers, or auto: measure for a few seconds and choose. [default: 1]"),
    ] = None,
    transport: Annotated[
        str | None, typer.Option(help="How workers exchange tensors. [default: shm on one host]")
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(help="Where workers run. [default: local; env under torchrun, mpirun and srun]"),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads a worker. [default: cores / workers]")] = None,
    batch: Annotated[
        int | None, typer.Option(help="Samples a step, over all workers. [default: the task's]")
    ] = None,
    accumulate: Annotated[
        int | None, typer.Option(help="Micro-batches a worker and step. [default: 1]")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="From batch to optimiser and schedule. [default: the task's]")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate a 256 samples; short for --set recipe.lr=.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of parameters and sample order. [default: 0]")] = None,
    sync_batchnorm: Annotated[
        bool | None,
        typer.Option("--sync-batchnorm", help="Batch norm over the global batch, not a worker's share."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or float64. [default: float32]")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda. [default: auto]")] = None,
    epochs: Annotated[
        float | None, typer.Option(help="Length of the schedule. [default: the task's]")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Stop earlier, after this many samples.")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Stop earlier, after this much training time.")
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="The test metric that counts as trained. [default: the task's]")
    ] = None,
    stop_at_target: Annotated[
        bool | None, typer.Option("--stop-at-target", help="Stop when the target is reached.")
    ] = None,
    evaluate_every: Annotated[
        float | None, typer.Option(help="Epochs between evaluations. [default: 1]")
    ] = None,
    checkpoint_every: Annotated[
        float | None, typer.Option(help="Seconds between checkpoints; 0 is every step. [default: 60]")
    ] = None,
    keep: Annotated[int | None, typer.Option(help="Checkpoints to keep. [default: 3]")] = None,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds without a move that count as a hang. [default: adapts to the steps]"),
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(help="Start again from the last checkpoint when a worker fails. [default: 0]"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder. [default: runs/TASK-ID]")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in TASK, --out or runs/TASK-ID.")
    ] = False,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Continue although settings differ.")
    ] = False,
    track: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="tensorboard or mlflow; repeatable.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON on standard output.")
    ] = False,
) -> None:
    """Train a task and leave a run folder with its record, model and checkpoints."""
    from manyhands.arrange import leads
    from manyhands.run import train as run

    options, recipe_options = parse_set(set_ or [])
    given: dict[str, Any] = {
        "strategy": strategy,
        "workers": count_of(workers),
        "transport": transport,
        "launcher": launcher,
        "sync_batchnorm": sync_batchnorm,
        "timeout": timeout,
        "restarts": restarts,
        "threads": threads,
        "batch": batch,
        "accumulate": accumulate,
        "recipe": recipe,
        "seed": seed,
        "dtype": dtype,
        "device": device,
        "epochs": epochs,
        "samples": samples,
        "seconds": seconds,
        "target": target,
        "stop_at_target": stop_at_target,
        "evaluate_every": evaluate_every,
        "checkpoint_every": checkpoint_every,
        "keep": keep,
        "options": options or None,
        "recipe_options": recipe_options or None,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    record = run(
        task,
        lr=lr,
        out=out,
        resume=resume,
        allow_changes=allow_changes,
        quiet=quiet,
        track=track or [],
        **settings,
    )
    if json and leads():
        print(record.model_dump_json(indent=2))


def count_of(workers: str | None) -> int | str | None:
    """`2`, or `auto`."""
    if workers is None or workers == "auto":
        return workers
    try:
        return int(workers)
    except ValueError:
        raise UsageError(f"--workers takes a whole number or auto, got {workers!r}") from None


def parse_set(pairs: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """`width=2` is an option of the task, `recipe.warmup=1` of the recipe."""
    options: dict[str, str] = {}
    recipe: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--set takes KEY=VALUE, got {pair!r}")
        axis, dot, option = name.partition(".")
        if not dot:
            options[name] = value
        elif axis == "recipe":
            recipe[option] = value
        else:
            raise UsageError(
                f"--set {pair}: only options of the task (KEY) and of the recipe (recipe.KEY) can be set"
            )
    return options, recipe
