"""Made-up records for tests of analyses and reports: plausible values where a test gives none."""

from __future__ import annotations

from typing import Any

from manyhands.core.environment import Environment
from manyhands.core.registry.launchers import LOCAL
from manyhands.core.registry.strategies import ONE_WORKER, STRATEGIES
from manyhands.core.registry.transports import ONE_HOST
from manyhands.records.record import Evaluation, RunRecord, StepTimes
from manyhands.records.spec import RunSpec

ENVIRONMENT = Environment(
    manyhands="0.1.0",
    python="3.11.7",
    torch="2.13.0",
    numpy="2.0.0",
    platform="Linux",
    host="here",
    cpu="a processor",
    cores=2,
    threads=1,
    device="cpu",
    memory=24 * 2**30,
    commit=None,
    command=["manyhands", "study"],
    started="2026-11-16T10:00:00+00:00",
)
STEP = {"data": 0.02, "forward": 0.30, "backward": 0.60, "optimizer": 0.08}  # shares of one worker's step


def record(
    *,
    rate: float = 10_000.0,
    steps_to_target: int | None = 400,
    metric: float | None = None,
    phases: dict[str, float] | None = None,
    threads: int = 1,
    cores: int = 2,
    **fields: Any,
) -> RunRecord:
    """A finished run of `mnist-mlp` at this rate, with its target after `steps_to_target` (or never).

    `phases` are seconds of its mean step by phase. Fields of RunSpec (`strategy`, `workers`, `batch`, ...)
    and of RunRecord (`memory`, `staleness`, ...) are taken by name.
    """
    wanted = {name: fields.pop(name) for name in list(fields) if name in RunSpec.model_fields}
    alone = STRATEGIES[wanted.get("strategy", ONE_WORKER)].one_worker and wanted.get("workers", 1) == 1
    shared = {} if alone else {"transport": ONE_HOST, "launcher": LOCAL}
    spec = RunSpec.of(
        **{"task": "mnist-mlp", "batch": 128, "epochs": 3.0, "target": 0.97, "recipe": "large-batch"}
        | shared
        | wanted
        | {"threads": wanted.get("threads") or threads}
    )
    assert spec.batch is not None
    n, step = 60_000, spec.batch / rate
    steps = round((spec.epochs or 1) * n / spec.batch)
    reached = steps_to_target is not None and steps_to_target <= steps
    if phases is None:
        phases = {name: share * step for name, share in STEP.items()}
    score = metric if metric is not None else (0.977 if reached else 0.9)
    counted = StepTimes(steps=steps, mean=step, low=step * 0.95, median=step, high=step * 1.1, phases=phases)
    points = [
        Evaluation(
            step=at,
            samples=at * spec.batch,
            seconds=at * step,
            loss=1.0 / (1 + at),
            metric=score - 0.3 * (1 - at / steps) ** 2,
            test_loss=1.1 / (1 + at),
        )
        for at in sorted({max(1, steps * k // 12) for k in range(1, 13)})
    ]
    ranks = spec.ranks
    values: dict[str, Any] = {
        "id": spec.id,
        "run": f"results/test/{spec.name}",
        "status": "finished",
        "spec": spec,
        "recipe": {"name": spec.recipe, "lr": 0.1, "warmup": 1.0, "scaling": "linear"},
        "recipe_line": "sgd · lr 0.1",
        "parameters": 1_863_690,
        "unit": "images",
        "train_samples": n,
        "test_samples": 10_000,
        "steps": steps,
        "samples": steps * spec.batch,
        "epochs": steps * spec.batch / n,
        "seconds": steps * step * 1.05,
        "training_seconds": steps * step,
        "samples_per_second": rate,
        "loss": 0.05,
        "metric_name": "accuracy",
        "metric": score,
        "best_metric": score,
        "target": spec.target,
        "target_samples": steps_to_target * spec.batch if reached and steps_to_target else None,
        "target_seconds": steps_to_target * step if reached and steps_to_target else None,
        "target_steps": steps_to_target if reached else None,
        "curve": points,
        "phases": [{name: value * steps for name, value in phases.items()}] * ranks,
        "traffic": [{"add_shared": {"calls": steps, "bytes": 7.5e6 * steps, "seconds": 0.1}}] * ranks
        if ranks > 1
        else [{}],
        "hosts": ["here"] * ranks,
        "step_times": [counted] * ranks,
        "steady_samples_per_second": rate,
        "peak_memory": 400_000_000,
        "memory": [400_000_000] * ranks,
        "resumed": 0,
        "environment": ENVIRONMENT.model_copy(update={"threads": spec.threads, "cores": cores}),
    }
    return RunRecord(**(values | fields))


def repeated(run: RunRecord, times: int) -> list[RunRecord]:
    """The same run as this many repeats of its cell, each in a folder of its own."""
    return [
        run.model_copy(update={"repeat": number, "run": f"{run.run}-{number}"}) for number in range(times)
    ]
