"""A rich study that was never run: two tasks, seven strategies, 1, 2 and 4 workers, and what goes wrong."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from manyhands.records.record import Evaluation, Noise, RunRecord, Span
from manyhands.records.spec import RunSpec
from manyhands.records.study_results import Block, Calibration, Cell, Results, Without
from manyhands.testing.records import record

BATCHES = (32, 64, 128, 256, 512, 1024)
B_CRIT, S_MIN = 430.0, 260.0
RATE = {"mnist-mlp": 9_400.0, "mnist-cnn": 860.0}
SIZE = {"mnist-mlp": 7.5e6, "mnist-cnn": 4.8e6}
# speed-up with 2 and 4 workers on two cores, share of the step lost, and to what
WAYS: dict[str, tuple[dict[int, float], float, str]] = {
    "single": ({1: 1.0}, 0.0, "wait"),
    "allreduce": ({1: 0.99, 2: 1.91, 4: 1.82}, 0.06, "communication"),
    "average": ({1: 1.0, 2: 1.96, 4: 1.90}, 0.02, "communication"),
    "server": ({1: 0.72, 2: 1.22, 4: 1.10}, 0.38, "communication"),
    "hogwild": ({1: 0.98, 2: 1.88, 4: 1.80}, 0.01, "wait"),
    "layers": ({2: 0.93, 4: 0.80}, 0.47, "wait"),
    "pipeline": ({2: 1.45, 4: 1.21}, 0.24, "wait"),
}
OPTIONS: dict[str, dict[str, Any]] = {"average": {"every": 16}, "pipeline": {"micro_batches": 4}}


def steps_to_target(batch: int, strategy: str, workers: int, chance: random.Random) -> int:
    """What the law of diminishing returns says, somewhat more for stale gradients, and some luck."""
    extra = 1 + 0.06 * workers * (strategy in ("server", "hogwild")) + 0.08 * (strategy == "average")
    return round(S_MIN * (1 + B_CRIT / batch) * extra * chance.uniform(0.96, 1.05))


def phases(strategy: str, step: float, lost: float, to: str) -> dict[str, float]:
    work = {
        "data": 0.015,
        "forward": 0.31,
        "backward": 0.58,
        "optimizer": 0.095 if strategy != "server" else 0.0,
    }
    whole = sum(work.values())
    parts = {name: step * (1 - lost) * share / whole for name, share in work.items() if share}
    return parts | ({to: step * lost} if lost else {})


def pipelined(stages: int, micro: int, unit: float = 0.004) -> list[list[Span]]:
    """GPipe by hand: forwards from the first stage to the last, backwards the other way."""
    done: dict[tuple[str, int, int], float] = {}
    lines: list[list[Span]] = [[] for _ in range(stages)]
    free = [0.0] * stages

    def run(stage: int, phase: str, ready: float, length: float, key: tuple[str, int, int]) -> None:
        if ready > free[stage] + 1e-9:
            lines[stage].append(Span("wait", free[stage], ready))
        begin = max(ready, free[stage])
        lines[stage].append(Span(phase, begin, begin + length))
        free[stage] = done[key] = begin + length

    for m in range(micro):
        for stage in range(stages):
            run(stage, "forward", done.get(("forward", stage - 1, m), 0.0), unit, ("forward", stage, m))
    for m in range(micro):
        for stage in reversed(range(stages)):
            run(
                stage, "backward", done.get(("backward", stage + 1, m), 0.0), 2 * unit, ("backward", stage, m)
            )
    end = max(free)
    for stage in range(stages):
        if free[stage] < end - 1e-9:
            lines[stage].append(Span("wait", free[stage], end))
        lines[stage].append(Span("optimizer", end, end + unit / 2))
    return lines


def parallel(ranks: int, parts: dict[str, float], servers: int = 0) -> list[list[Span]]:
    lines = []
    for rank in range(ranks):
        at, line = 0.0, []
        for phase, seconds in parts.items() if rank >= servers else {"wait": sum(parts.values())}.items():
            line.append(Span(phase, at, at + seconds * (1 + 0.04 * (rank % 2))))
            at = line[-1].end
        lines.append(line)
    return lines


def curve(batch: int, rate: float, reach: int, best: float, steps: int, noisy: bool) -> list[Evaluation]:
    points = []
    for k in range(1, 15):
        at = max(1, steps * k // 14)
        ease = 1 - math.exp(-2.2 * at / reach)
        loss = 0.06 + 2.2 * math.exp(-2.0 * at / reach)
        spread = (1.0, 60.0 * math.exp(2.0 * at / steps)) if noisy else None
        points.append(
            Evaluation(
                step=at,
                samples=at * batch,
                seconds=at * batch / rate,
                loss=loss * 0.9,
                metric=best * (0.86 + 0.14 * ease),
                test_loss=loss,
                noise=spread,
            )
        )
    return points


def one(
    task: str, strategy: str, workers: int, batch: int, repeat: int, threads: int = 1, **more: Any
) -> RunRecord:
    """One run of the study."""
    key = f"{task} {strategy} {workers} {batch} {repeat} {threads} {sorted(more)}"
    chance = random.Random(key)
    gains, lost, to = WAYS[strategy]
    gain = 1.42 if threads > 1 else gains[workers] * (0.6 + 0.4 * min(1.0, batch / (64 * workers)))
    rate = RATE[task] * gain * chance.uniform(0.975, 1.02)
    step = batch / rate
    lost = min(0.75, lost * (1 + 24 / batch * workers)) if workers > 1 or strategy == "server" else 0.0
    if workers == 4:
        lost = min(0.8, lost + 0.12)
    parts = phases(strategy, step, lost, to)
    mlp = task == "mnist-mlp"
    reach = steps_to_target(batch, strategy, workers, chance) if mlp else 900
    steps = min(round(6 * 60_000 / batch), round(2.0 * reach)) if mlp else 400
    if strategy == "layers" and batch == 1024:
        reach = 10**9
    reached = mlp and reach <= steps
    ranks = workers + (strategy == "server")
    shm = {} if strategy == "single" else {"transport": "shm", "launcher": "local"}
    stale = {}
    if strategy in ("server", "hogwild") and workers > 1:
        mean = workers - 1
        stale = {
            k: round(4000 * math.exp(-mean) * mean**k / math.factorial(k)) + 1 for k in range(3 * workers)
        }
    moved = (
        0.0
        if strategy == "single"
        else SIZE[task]
        * {"average": 1 / 16, "layers": 0.02, "pipeline": 0.02, "hogwild": 0.0}.get(strategy, 2.0)
    )
    lines = parallel(ranks, parts, ranks - workers)
    if strategy in ("layers", "pipeline"):
        lines = pipelined(workers, 4 if strategy == "pipeline" else 1, step / 40)
    noise = Noise(
        small=batch / 2, big=batch, gradient=1.0, spread=390.0 * chance.uniform(0.9, 1.1), steps=200
    )
    base = 0.9765 - 0.0004 * math.log2(batch / 32)
    memory = [
        round(
            (410 if mlp else 520)
            * 1e6
            * chance.uniform(0.97, 1.03)
            / (workers**0.5 if strategy == "pipeline" else 1)
        )
        for _ in range(ranks)
    ]
    fields: dict[str, Any] = {
        "task": task,
        "strategy": strategy,
        "strategy_options": OPTIONS.get(strategy, {}),
        "workers": workers,
        "batch": batch,
        "seed": repeat,
        "rate": rate,
        "phases": parts,
        "threads": threads,
        "steps_to_target": reach if reached else None,
        "target_steps": reach if reached else None,
        "target_samples": reach * batch if reached else None,
        "target_seconds": reach * step if reached else None,
        "steps": steps,
        "metric": base if mlp else 0.91,
        "curve": curve(
            batch, rate, min(reach, steps * 3), base + 0.004, steps, strategy == "allreduce" and workers == 2
        ),
        "staleness": stale,
        "peak_memory": max(memory),
        "timeline": lines,
        "noise": noise if strategy == "allreduce" and workers == 2 and mlp else None,
        "traffic": [{"exchange": {"calls": float(2 * steps), "bytes": moved * steps, "seconds": 0.2}}] * ranks
        if moved
        else [{}] * ranks,
        "repeat": repeat,
        "machine_noise": 0.03 if chance.random() < 0.96 else 0.22,
        "epochs": 6.0,
        **shm,
    }
    made = record(**(fields | more))
    later = {"memory": memory, "samples": steps * batch, "run": f"results/default/{made.spec.name}"}
    return made.model_copy(update=later)


def rich(folder: Path, repeats: int = 3) -> Results:
    """The study that the report's tests and screenshots show."""
    records: list[RunRecord] = []
    for task, batches in (("mnist-mlp", BATCHES), ("mnist-cnn", (128,))):
        for strategy, (gains, _, _) in WAYS.items():
            for workers in gains:
                for batch in batches:
                    if (
                        strategy in ("server", "hogwild", "layers")
                        and batch in (32, 1024)
                        and strategy != "layers"
                    ):
                        continue
                    records += [one(task, strategy, workers, batch, repeat) for repeat in range(repeats)]
        records += [one(task, "single", 1, 128, repeat, threads=2) for repeat in range(repeats)]
    for scaling, warmup in (("linear", 1.0), ("linear", 0.0), ("none", 0.0)):
        for batch in (64, 256, 1024, 2048):
            for seed in range(2):
                records.append(_recipe(batch, scaling, warmup, seed))
    cell = Cell(RunSpec.of(task="mnist-cnn", strategy="pipeline", workers=4, batch=130))
    times = [0.200, 0.203, 0.201, 0.208, 0.205, 0.247, 0.204, 0.202, 0.206, 0.201, 0.203]
    return Results(
        folder,
        "default",
        "The default study",
        about="Which way of dividing the work is worth it here, for a dense and a convolutional network.",
        price=0.05,
        command=["manyhands", "study", "default"],
        records=records,
        failed=[
            Without(
                cell,
                "worker 3 of 4 (pid 4242) was killed by signal 9 (SIGKILL, often: out of memory) at step 12",
            )
        ],
        excluded=[
            Without(
                cell._replace(spec=cell.spec.replace(strategy="layers", workers=8)),
                "the model has 4 layers, fewer than 8 stages",
            )
        ],
        left=[
            Without(
                cell._replace(spec=cell.spec.replace(batch=2048)),
                "no time left: the budget of 5 minutes was spent",
            )
        ],
        repeated=[one("mnist-mlp", "allreduce", 2, 256, 7)],
        calibrations=[Calibration(f"2026-11-16T10:{2 * k:02d}:00.000+00:00", s) for k, s in enumerate(times)],
    )


def _recipe(batch: int, scaling: str, warmup: float, seed: int) -> RunRecord:
    falls = {("linear", 1.0): 0.0006, ("linear", 0.0): 0.004, ("none", 0.0): 0.007}[(scaling, warmup)]
    gone = scaling == "linear" and not warmup and batch == 2048 and seed == 1
    score = 0.9775 - falls * max(0.0, math.log2(batch / 128)) + 0.0006 * seed
    made = one(
        "mnist-mlp",
        "single",
        1,
        batch,
        10 + seed,
        recipe_options={"scaling": scaling, "warmup": warmup},
        timed=False,
    )
    return made.model_copy(
        update={
            "metric": None if gone else score,
            "best_metric": score,
            "status": "diverged" if gone else "finished",
            "recipe": {"name": "large-batch", "lr": 0.1, "warmup": warmup, "scaling": scaling},
        }
    )


# speeds of ten variants over one worker, for a study in pairs: three of them are equal
TEN: tuple[tuple[str, int, dict[str, Any], float], ...] = (
    ("allreduce", 2, {}, 1.90),
    ("average", 2, {}, 1.90),
    ("average", 2, {"every": 4}, 1.90),
    ("server", 2, {}, 1.40),
    ("hogwild", 2, {}, 1.75),
    ("layers", 2, {}, 0.95),
    ("pipeline", 2, {"micro_batches": 4}, 1.30),
    ("pipeline", 2, {"micro_batches": 8}, 1.45),
    ("sharded", 2, {}, 1.10),
)


def paired(folder: Path, rounds: int = 6, noise: float = 0.02) -> Results:
    """A study whose speeds were measured in paired blocks, on a machine that drifts by 20 %."""
    chance = random.Random(f"paired {rounds} {noise}")
    base = record(rate=9_000.0, steps_to_target=None, epochs=None, seconds=4.0, threads=1)
    cells = [(base, 1.0)]
    for strategy, workers, options, gain in TEN:
        fields: dict[str, Any] = {"strategy": strategy, "workers": workers, "strategy_options": options}
        fields |= {"rate": 9_000.0 * gain, "steps_to_target": None, "epochs": None, "seconds": 4.0}
        cells.append((record(**fields), gain))
    records, keys = [], []
    for made, _ in cells:
        key = Cell(made.spec, paired=True).key
        keys.append(key)
        more = {"cell": key, "paired": True, "run": f"{folder}/{key}", "best_metric": None, "metric": None}
        records.append(made.model_copy(update=more | {"curve": []}))
    blocks = []
    for number in range(rounds):
        order = [k for cell in range(1, len(cells)) for k in (0, cell)] + [0]
        for position, k in enumerate(order):
            drift = 0.1 * math.sin(number + position / 9)
            rate = 9_000.0 * cells[k][1] * math.exp(drift + chance.gauss(0, noise))
            blocks.append(Block(keys[k], number, position, rate, 20, 1.0))
    command = ["manyhands", "study", "paired"]
    return Results(folder, "paired", "Ten in pairs", command=command, records=records, blocks=blocks)


def ten(folder: Path) -> Results:
    """Eleven variants on a machine that is fast: times in milliseconds, clocks that do not start together."""
    records = []
    ways = [("single", 1, {}, 1.0, 1), ("single", 1, {}, 1.5, 2)]
    ways += [(*way[:3], way[3], 1) for way in TEN] + [("average", 4, {"every": 64}, 1.2, 1)]
    for strategy, workers, options, gain, threads in ways:
        rate = 150_000.0 * gain
        step = 128 / rate
        lines = parallel(workers + (strategy == "server"), phases(strategy, step, 0.2, "wait"))
        if strategy in ("hogwild", "average"):  # the second worker was traced 25 ms later
            lines[1] = [Span(phase, begin + 0.025, end + 0.025) for phase, begin, end in lines[1]]

        made = record(
            **{"task": "digits-mlp", "strategy": strategy, "workers": workers, "strategy_options": options},
            **{"rate": rate, "threads": threads, "steps_to_target": 400, "timeline": lines},
            traffic=[{"barrier": {"calls": 1.0, "bytes": 4.0, "seconds": 0.0}}]
            if strategy == "single"
            else [{"send": {"calls": 9.0, "bytes": 9e8, "seconds": 0.1}}] * len(lines),
        )
        records.append(made.model_copy(update={"run": f"{folder}/{made.spec.name}"}))
    times = [0.200, 0.150, 0.201, 0.260, 0.205, 0.170, 0.204, 0.203]
    calibrations = [Calibration(f"2026-11-16T10:0{k}:00.000+00:00", each) for k, each in enumerate(times)]
    also = paired(folder)
    return Results(
        *(folder, "ten", "Eleven variants"),
        command=["manyhands", "study", "ten"],
        records=[*records, *also.records],
        blocks=also.blocks,
        calibrations=calibrations,
    )


def many(folder: Path, number: int = 2_000) -> Results:
    """So many records, over more batches, repeats and strategies than anybody runs."""
    records: list[RunRecord] = []
    repeat = 0
    while len(records) < number:
        for task in RATE:
            for strategy, (gains, _, _) in WAYS.items():
                for workers in gains:
                    records += [one(task, strategy, workers, batch, repeat) for batch in BATCHES]
        repeat += 1
    return Results(
        folder, "many", "Two thousand runs", command=["manyhands", "study", "many"], records=records[:number]
    )
