"""`manyhands train`: train a task, or continue a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

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
            help="An option of the task, recipe.KEY=VALUE or strategy.KEY=VALUE; repeatable.",
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
    threads: Annotated[int | None, typer.Option(help="Threads a worker. [default: cores / ranks]")] = None,
    batch: Annotated[
        int | None, typer.Option(help="Samples a step, over all workers. [default: the task's]")
    ] = None,
    accumulate: Annotated[
        int | None, typer.Option(help="Micro-batches a worker and step. [default: 1]")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="From batch to optimizer and schedule. [default: the task's]")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate a 256 samples; short for --set recipe.lr=.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of parameters and sample order. [default: 0]")] = None,
    every: Annotated[
        str | None, typer.Option(help="average: steps between averages, or epoch, or end. [default: 16]")
    ] = None,
    post_local: Annotated[
        bool | None, typer.Option("--post-local", help="average: every step until the rate first decays.")
    ] = None,
    outer: Annotated[
        str | None, typer.Option(help="average: mean, nesterov (DiLoCo) or elastic (EASGD). [default: mean]")
    ] = None,
    servers: Annotated[int | None, typer.Option(help="server: ranks that serve. [default: 1]")] = None,
    push_every: Annotated[int | None, typer.Option(help="server: steps between pushes. [default: 1]")] = None,
    pull_every: Annotated[int | None, typer.Option(help="server: steps between pulls. [default: 1]")] = None,
    staleness_aware: Annotated[
        bool | None,
        typer.Option("--staleness-aware", help="server: divide a gradient's rate by its staleness."),
    ] = None,
    bound: Annotated[
        int | None, typer.Option(help="server: steps a worker may be ahead of the slowest. [default: any]")
    ] = None,
    backup: Annotated[
        int | None,
        typer.Option(help="server: synchronous rounds that do not wait for the slowest so many workers."),
    ] = None,
    stages: Annotated[
        int | None, typer.Option(help="pipeline: parts of the model, a worker each. [default: workers]")
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="pipeline: parts of a batch. [default: measured before the run]")
    ] = None,
    schedule: Annotated[str | None, typer.Option(help="pipeline: gpipe or 1f1b. [default: 1f1b]")] = None,
    recompute: Annotated[
        bool | None,
        typer.Option("--recompute", help="pipeline: compute activations again, do not keep them."),
    ] = None,
    offload: Annotated[
        str | None,
        typer.Option(help="Activations that leave the device until backward: all, conv, auto or none."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="What a worker may use, such as 2GB; chooses --offload auto.")
    ] = None,
    offload_to: Annotated[
        Path | None, typer.Option(help="Folder for activations on disk. [default: the system's temporary]")
    ] = None,
    strict: Annotated[
        bool | None,
        typer.Option("--strict", help="End the run when a worker is lost, even if the others can go on."),
    ] = None,
    sync_batchnorm: Annotated[
        bool | None,
        typer.Option("--sync-batchnorm", help="Batch norm over the global batch, not a worker's share."),
    ] = None,
    noise_scale: Annotated[
        bool | None,
        typer.Option("--noise-scale", help="Measure the noise of gradients, and with it the critical batch."),
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
        typer.Option(
            help="Start again from the last checkpoint when a worker fails; with server and hogwild, start a "
            "new worker in its place. [default: 0]"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder. [default: runs/TASK-ID]")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in TASK, --out or runs/TASK-ID.")
    ] = False,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Continue although settings differ.")
    ] = False,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="With --resume: import the task file of a folder that you did not start."
        ),
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
    from manyhands.runs.defaults import leads
    from manyhands.runs.train import train as run

    options, recipe_options, strategy_options = parse_set(set_ or [])
    short = {
        "every": every,
        "post_local": post_local,
        "outer": outer,
        "servers": servers,
        "push_every": push_every,
        "pull_every": pull_every,
        "staleness_aware": staleness_aware,
        "bound": bound,
        "backup": backup,
        "stages": stages,
        "micro_batches": micro_batches,
        "schedule": schedule,
        "recompute": recompute,
    }
    strategy_options |= {name: value for name, value in short.items() if value is not None}
    given: dict[str, Any] = {
        "strategy": strategy,
        "strategy_options": strategy_options or None,
        "strict": strict,
        "offload": offload,
        "memory": memory,
        "offload_to": None if offload_to is None else str(offload_to),
        "workers": count_of(workers),
        "transport": transport,
        "launcher": launcher,
        "sync_batchnorm": sync_batchnorm,
        "noise_scale": noise_scale,
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
        trust=trust,
        quiet=quiet,
        track=track or [],
        **settings,
    )
    if json and leads():
        print(formatting.json_printed(record.model_dump_json(indent=2)))


def count_of(workers: str | None) -> int | str | None:
    """`2`, or `auto`."""
    if workers is None or workers == "auto":
        return workers
    try:
        return int(workers)  # of so many digits as Python reads
    except ValueError:
        raise UsageError(f"--workers takes a whole number or auto, got {shown(workers)}") from None


def parse_set(pairs: list[str]) -> tuple[dict[str, str], dict[str, str], dict[str, Any]]:
    """`width=2` is an option of the task, `recipe.warmup=1` of the recipe, `strategy.every=4` of that."""
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
