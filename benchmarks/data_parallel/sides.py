"""What is compared: functions that train for some steps at a place and return the seconds of each step.

All sides use the same fused optimizer with the same two groups, draw their batches from the same tensors, and
are started by the same launcher. Ours keeps freed memory in the process (`core.allocator`), which a loop
written by hand does not; `kept` gives the others the same.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import manyhands
from manyhands.core.allocator import kept_memory
from manyhands.core.rank_info import RankInfo
from manyhands.tasks import find

TASKS = Path(__file__).parent / "tasks.py"


def bare(info: RankInfo, task: str, batch: int, steps: int, threads: int, kept: bool) -> list[float]:
    """One worker's plain loop; `batch` is its own."""
    torch.set_num_threads(threads)
    model, inputs, targets = _parts(task)
    return _loop(model, model, inputs, targets, batch, steps, kept)


def ddp(info: RankInfo, task: str, batch: int, steps: int, threads: int, kept: bool) -> list[float]:
    """torch's DistributedDataParallel on gloo; `batch` is a worker's."""
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    torch.set_num_threads(threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = None
    if info.rank == 0:
        store = TCPStore("127.0.0.1", 0, info.size, is_master=True, wait_for_workers=False)
    port = info.channel.exchange(store.port if store else None)[0]
    store = store or TCPStore("127.0.0.1", port, info.size, is_master=False)
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=info.rank, world_size=info.size, timeout=limit)
    model, inputs, targets = _parts(task)
    replica = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    times = _loop(replica, model, inputs, targets, batch, steps, kept)
    dist.barrier()
    dist.destroy_process_group()
    return times


def horovod(info: RankInfo, task: str, batch: int, steps: int, threads: int, kept: bool) -> list[float]:
    """Horovod's distributed optimizer, where it can be imported."""
    import horovod.torch as hvd

    torch.set_num_threads(threads)
    hvd.init()
    model, inputs, targets = _parts(task)
    optimizer = hvd.DistributedOptimizer(_optimizer(model), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return _loop(model, model, inputs, targets, batch, steps, kept, optimizer=optimizer)


def ours(task: str, batch: int, steps: int, workers: int, threads: int, folder: Path) -> list[float]:
    """`manyhands train --workers N` as a user runs it, journal and all; `batch` is a worker's."""
    record = manyhands.train(
        f"{TASKS}:{task}",
        batch=batch * workers,
        samples=min(60_000, batch * workers * steps),
        epochs=1,
        lr=0.01,
        recipe_options={"scaling": "none", "decay": "none"},
        workers=workers,
        threads=threads,
        out=folder / "run",
        quiet=True,
    )
    from manyhands.records.run_folder import RunFolder

    moments = [0.0, *(step.seconds for step in RunFolder(Path(record.run)).steps())]
    return [after - before for before, after in pairwise(moments)]


def _parts(task: str) -> tuple[nn.Module, Tensor, Tensor]:
    built = find.build(f"{TASKS}:{task}", {})
    assert isinstance(built.train, manyhands.ArrayData)
    torch.manual_seed(0)
    return built.model(), built.preprocess.float()(built.train.inputs), built.train.targets


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    groups = [{"params": decayed, "weight_decay": 1e-4}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True, fused=True)


def _loop(
    forward: nn.Module,
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    batch: int,
    steps: int,
    kept: bool,
    *,
    optimizer: Any = None,
) -> list[float]:
    optimizer = optimizer or _optimizer(model)
    order = torch.randperm(len(targets))
    with kept_memory() if kept else nullcontext():
        moments = [time.perf_counter()]
        for step in range(steps):
            first = step * batch % (len(targets) - batch)
            index = order[first : first + batch]
            loss = nn.functional.cross_entropy(forward(inputs[index]), targets[index])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            moments.append(time.perf_counter())
    return [after - before for before, after in pairwise(moments)]
