"""What is compared: functions that train for some steps at a place and return the seconds of each step.

All sides use one fused optimizer, take their batches from the same tensors in the same order, are started by
the same launcher and keep freed memory in the process (manyhands.core.allocator), as ours does.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import manyhands
from manyhands.core.allocator import kept_memory
from manyhands.core.rank_info import RankInfo
from manyhands.records.phases import training_phases
from manyhands.tasks import find

TASKS = Path(__file__).parent / "tasks.py"


class Ours(NamedTuple):
    """Seconds of each step, and the part of the time that each worker waited."""

    times: list[float]
    idle: list[float]
    cut: str


def alone(info: RankInfo, task: str, batch: int, micro_batches: int, steps: int, threads: int) -> list[float]:
    """One worker that accumulates the micro-batches one after the other; one of them is the whole batch."""
    torch.set_num_threads(threads)
    model, inputs, targets = _parts(task)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    with kept_memory():
        moments = [time.perf_counter()]
        for step in range(steps):
            own = _of(step, batch, len(targets))
            parts = zip(inputs[own].chunk(micro_batches), targets[own].chunk(micro_batches), strict=True)
            for x, y in parts:
                loss = nn.functional.cross_entropy(model(x), y) * (len(y) / batch)
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            moments.append(time.perf_counter())
    return [after - before for before, after in pairwise(moments)]


def torch_pipelining(
    info: RankInfo,
    task: str,
    batch: int,
    micro_batches: int,
    steps: int,
    schedule: str,
    cut: int,
    threads: int,
) -> list[float]:
    """torch.distributed.pipelining on gloo with the same cut, schedule and micro-batches."""
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    torch.set_num_threads(threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = None
    if info.rank == 0:
        store = TCPStore("127.0.0.1", 0, info.size, is_master=True, wait_for_workers=False)
    port = info.channel.exchange(store.port if store else None)[0]
    store = store or TCPStore("127.0.0.1", port, info.size, is_master=False)
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=info.rank, world_size=2, timeout=limit)
    model, inputs, targets = _parts(task)
    assert isinstance(model, nn.Sequential)
    part = model[:cut] if info.rank == 0 else model[cut:]
    stage = PipelineStage(part, info.rank, 2, torch.device("cpu"))
    # its 1f1b wants as many micro-batches as stages; with one of them the two schedules are the same
    kind: Any = ScheduleGPipe if schedule == "gpipe" or micro_batches == 1 else Schedule1F1B
    runner = kind(stage, micro_batches, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01, momentum=0.9, fused=True)
    with kept_memory():
        moments = [time.perf_counter()]
        for step in range(steps):
            own = _of(step, batch, len(targets))
            if info.rank == 0:
                runner.step(inputs[own])
            else:
                runner.step(target=targets[own])
            optimizer.step()
            optimizer.zero_grad()
            moments.append(time.perf_counter())
    dist.barrier()
    dist.destroy_process_group()
    return [after - before for before, after in pairwise(moments)]


def ours(
    task: str, batch: int, micro_batches: int, steps: int, schedule: str, cut: int, folder: Path
) -> Ours:
    """`manyhands train --strategy pipeline --workers 2` as a user runs it, journal and all."""
    options: dict[str, Any] = {"micro_batches": micro_batches, "schedule": schedule}
    if cut:
        options["cut"] = (cut,)
    built = find.build(f"{TASKS}:{task}", {})
    record = manyhands.train(
        f"{TASKS}:{task}",
        strategy="pipeline",
        strategy_options=options,
        batch=batch,
        samples=batch * steps,
        epochs=batch * steps / len(built.train),
        evaluate_every=1e6,
        lr=0.01,
        recipe="constant",
        recipe_options={"momentum": 0.9},
        workers=2,
        threads=1,
        out=folder / "run",
        quiet=True,
    )
    from manyhands.records.run_folder import RunFolder

    moments = [0.0, *(step.seconds for step in RunFolder(Path(record.run)).steps())]
    idle = []
    for phases in record.phases:
        training = training_phases(phases)
        idle.append(training["wait"] / sum(training.values()))
    return Ours([after - before for before, after in pairwise(moments)], idle, record.choices["cut"])


def _of(step: int, batch: int, samples: int) -> slice:
    first = step * batch % samples
    return slice(first, first + batch)


def _parts(task: str) -> tuple[nn.Module, Tensor, Tensor]:
    built = find.build(f"{TASKS}:{task}", {})
    assert isinstance(built.train, manyhands.ArrayData)
    torch.manual_seed(0)
    return built.model(), built.train.inputs, built.train.targets
