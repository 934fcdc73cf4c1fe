"""The sides: our strategies, a Hogwild loop written by hand, and a parameter server of Ray actors."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

import manyhands as mh
from manyhands.core.allocator import kept_memory
from manyhands.data.order import Order
from manyhands.records.run_folder import RunFolder
from manyhands.tasks import find

WARM_UP = 0.25  # of the time of a run, which says nothing
WORKERS = 2


class Rate(NamedTuple):
    """What one round of one side showed."""

    samples: float  # a second
    updates: float  # of the parameters, a second
    staleness: dict[int, int]


def ours(task: str, batch: int, seconds: float, workers: int, settings: dict[str, Any]) -> Rate:
    """A run of ours: rates from its own journal, the first part left out."""
    with tempfile.TemporaryDirectory() as folder:
        record = mh.train(
            task,
            batch=batch * workers,
            workers=workers,
            threads=1,
            seconds=seconds,
            epochs=1000,
            evaluate_every=1e6,
            recipe="constant",
            recipe_options={"lr": 0.01},
            checkpoint_every=1e6,
            quiet=True,
            out=Path(folder) / "run",
            **settings,
        )
        steps = RunFolder(Path(folder) / "run").steps()
    first = next(step for step in steps if step.seconds >= WARM_UP * seconds)
    last = steps[-1]
    span = last.seconds - first.seconds
    # several records may be told at one moment: the samples of the first one's moment are not in the span
    return Rate((last.samples - first.samples) / span, (last.step - first.step) / span, record.staleness)


# ---- by hand, as in the MNIST Hogwild example of PyTorch: share_memory(), one process per worker, no locks


def by_hand(task: str, batch: int, kept: bool, seconds: float) -> Rate:
    """Two processes that train one shared model; `kept` as ours keep freed memory in the process."""
    torch.manual_seed(0)
    model = find.build(task, {}).model().share_memory()
    context = mp.get_context("spawn")
    counts = torch.zeros(WORKERS, 2, dtype=torch.float64)  # samples, seconds
    counts.share_memory_()  # type: ignore[no-untyped-call]
    start = context.Barrier(WORKERS)
    processes = [
        context.Process(target=_train_by_hand, args=(rank, model, task, batch, kept, seconds, counts, start))
        for rank in range(WORKERS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    samples = float((counts[:, 0] / counts[:, 1]).sum())
    return Rate(samples, samples / batch, {})


def _train_by_hand(
    rank: int, model: nn.Module, task: str, batch: int, kept: bool, seconds: float, counts: Tensor, start: Any
) -> None:
    torch.set_num_threads(1)
    of = find.build(task, {})
    prepare = of.preprocess.float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = _batches(task, batch, rank)

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        of.loss(model(prepare(inputs)), targets).backward()
        optimizer.step()

    with kept_memory() if kept else nullcontext():
        _warm_up(step)
        start.wait()
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            step()
            steps += 1
    counts[rank, 0], counts[rank, 1] = steps * batch, time.perf_counter() - began


def _warm_up(step: Callable[[], None]) -> None:
    for _ in range(10):
        step()


def _batches(task: str, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    data = find.build(task, {}).train
    yield from data.stream(Order(len(data), batch, seed).batches(), seed)


# ---- a parameter server of Ray actors, as in Ray's own example


def ray_server(task: str, batch: int, seconds: float) -> Rate:
    """An actor that holds the parameters, two that compute gradients; updates are applied as they arrive."""
    import ray

    if not ray.is_initialized():
        ray.init(num_cpus=WORKERS + 1, include_dashboard=False, log_to_driver=False)
    folder = os.path.dirname(__file__)  # noqa: PTH120 (as sys.path has it)

    remote: Any = ray.remote

    class Server:
        def __init__(self) -> None:
            torch.set_num_threads(1)
            self.model = find.build(task, {}).model()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

        def apply(self, gradients: list[Any]) -> dict[str, Any]:
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad = torch.from_numpy(gradient.copy())
            self.optimizer.step()
            return self.weights()

        def weights(self) -> dict[str, Any]:
            return {name: tensor.numpy() for name, tensor in self.model.state_dict().items()}

    class Worker:
        def __init__(self, rank: int) -> None:
            torch.set_num_threads(1)
            self.of = find.build(task, {})
            self.prepare = self.of.preprocess.float()
            self.model, self.batches = self.of.model(), _batches(task, batch, rank)

        def gradients(self, weights: dict[str, Any]) -> list[Any]:
            self.model.load_state_dict({name: torch.from_numpy(a.copy()) for name, a in weights.items()})
            inputs, targets = next(self.batches)
            self.model.zero_grad()
            self.of.loss(self.model(self.prepare(inputs)), targets).backward()
            gradients = [parameter.grad for parameter in self.model.parameters()]
            return [gradient.numpy() for gradient in gradients if gradient is not None]

    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}}
    server = remote(Server).options(runtime_env=environment).remote()
    workers = [remote(Worker).options(runtime_env=environment).remote(rank) for rank in range(WORKERS)]
    weights = server.weights.remote()
    pending = {worker.gradients.remote(weights): worker for worker in workers}
    done, began = 0, 0.0
    while True:
        ready, _ = ray.wait(list(pending))
        worker = pending.pop(ready[0])
        pending[worker.gradients.remote(server.apply.remote(ready[0]))] = worker
        done += 1
        if done == 10:
            began = time.perf_counter()
        elif done > 10 and time.perf_counter() - began >= seconds:
            break
    rate = (done - 10) / (time.perf_counter() - began)
    ray.wait(list(pending), num_returns=len(pending))
    for actor in (server, *workers):
        ray.kill(actor)
    return Rate(rate * batch, rate, {})


def median(values: list[float]) -> float:
    """Of rounds."""
    return statistics.median(values)
