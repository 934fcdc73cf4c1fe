"""The settings of `mh.train` and `mh.verify`, for editors. Written by tools/typed_settings.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypedDict


class Settings(TypedDict, total=False):
    """Every field of RunSpec but the task, and every option of a strategy by its name."""

    options: dict[str, Any] | None  # Options of the task: --set KEY=VALUE
    strategy: str | None  # How the work is divided
    strategy_options: dict[str, Any] | None  # Options of the strategy
    transport: str | None  # How workers exchange tensors
    launcher: str | None  # Who starts the workers
    workers: int | Literal["auto"] | None  # Number of workers, or auto to measure and choose
    threads: int | None  # Threads per worker
    batch: int | None  # Samples per step, over all workers
    accumulate: int | None  # Micro-batches per worker and step
    drop_last: bool | None  # Leave out the last, short batch of each epoch: its samples are not used
    recipe: str | Callable[..., Any] | None
    recipe_options: dict[str, Any] | None  # Options of the recipe: --set recipe.KEY=VALUE
    lr_schedule: str | Callable[[int], float] | None
    epochs: float | None  # Length of the learning-rate schedule
    samples: int | None  # Stop early, after this many samples
    seconds: float | None  # Stop early, after this much training time
    target: float | None  # The test metric that counts as trained
    stop_at_target: bool | None  # Stop when the target is reached
    patience: int | None  # Stop after this many evaluations without a better metric
    keep_best: bool | None  # Write the model of the best evaluation to best.safetensors
    init: str | None  # Start from these weights: safetensors, or a state dict of torch.save
    evaluate_every: float | None  # Epochs between evaluations; 0: never
    seed: int | None  # Seed of parameters and sample order
    dtype: Literal["float32", "float64"] | None  # Type of parameters: float32 or float64
    precision: Literal["full", "bf16", "fp16"] | None
    compile: bool | None  # Compile the model with torch.compile; the first steps take longer
    sync_batchnorm: bool | None  # Batch norm over the global batch, not each worker's share
    offload: Literal["none", "all", "conv", "auto"] | None
    memory: int | str | None  # Memory per worker, such as 2GB; implies --offload auto
    offload_to: str | None  # Folder for activations on disk
    noise_scale: bool | None  # Measure the gradient noise scale, which predicts the critical batch
    device: Literal["auto", "cpu", "cuda"] | None  # Device: auto, cpu or cuda
    checkpoint_every: float | None  # Seconds between checkpoints; 0: after every step
    keep: int | None  # Number of checkpoints to keep
    timeout: float | None  # Seconds without progress that count as a hang
    restarts: int | None  # Restarts from the last checkpoint after a worker fails
    strict: bool | None  # End the run when a worker is lost, even if the others can continue
    every: int | str | None  # average: Steps between two averages, or 'epoch', or 'end'
    post_local: bool | None
    outer: Literal["mean", "nesterov", "elastic"] | None
    outer_lr: float | None  # average: Learning rate of the outer optimizer, with outer nesterov
    outer_momentum: float | None  # average: Momentum of the outer optimizer, with outer nesterov
    elasticity: float | None
    average_optimizer: bool | None
    servers: int | None  # server: Ranks that hold the parameters and do not train
    push_every: int | None  # server: Steps between two pushes of gradients to the servers
    pull_every: int | None  # server: Steps between two pulls of parameters from the servers
    staleness_aware: bool | None  # server: Divide the learning rate of each gradient by its staleness
    bound: int | None
    backup: int | None
    cut: tuple[int, ...] | None
    stages: int | None  # pipeline: Parts of the model, one worker each
    micro_batches: int | None  # pipeline: Parts of each replica's share of the batch
    schedule: Literal["gpipe", "1f1b"] | None
    recompute: bool | None
