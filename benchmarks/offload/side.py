"""One side of the comparison in a process of its own: it makes a step whenever it is asked to.

python benchmarks/offload/side.py SIDE BATCH SIZE THREADS [BYTES]      then a word a line: step, count, end
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from manyhands.core.allocator import kept_memory, returned_memory
from manyhands.offload import budget
from manyhands.offload.offloader import Offload
from manyhands.tasks.models.vgg import vgg19

Run = Callable[[nn.Module, Tensor], Tensor]


class Counter(TorchDispatchMode):
    """Bytes of activations alive at a time: what forward or recomputation made, and what was fetched back.

    It knows nothing of who keeps, moves or recomputes: it looks at every tensor that is made while gradients
    are recorded (backward itself makes its own without), and at the buffers that moved bytes are read into.
    """

    def __init__(self, others: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._others = {tensor.untyped_storage()._cdata for tensor in others}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it and look at what it made."""
        made = func(*args, **(kwargs or {}))
        fetched = func is torch.ops.aten.empty.memory_format and made.dtype == torch.uint8
        if torch.is_grad_enabled() or fetched:
            for tensor in tree_leaves(made):
                if isinstance(tensor, Tensor):
                    storage = tensor.untyped_storage()
                    if storage._cdata not in self._others and storage._cdata not in self._alive:
                        self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        for number in [n for n, (alive, _) in self._alive.items() if alive.expired()]:  # type: ignore[no-untyped-call]
            del self._alive[number]
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive.values()))
        return made


def checkpointed(module: nn.Module, inputs: Tensor) -> Tensor:
    """torch.utils.checkpoint around every block."""
    assert isinstance(module, nn.Sequential)
    for block in module:
        inputs = checkpoint(block, inputs, use_reentrant=False)
    return inputs


def saved_on_cpu(module: nn.Module, inputs: Tensor) -> Tensor:
    """torch.autograd.graph.save_on_cpu, which copies and frees nothing where all is on the CPU already."""
    with torch.autograd.graph.save_on_cpu():
        outputs: Tensor = module(inputs)
        return outputs


def plainly(module: nn.Module, inputs: Tensor) -> Tensor:
    """As it is."""
    outputs: Tensor = module(inputs)
    return outputs


def main() -> None:
    """Build the model, its gradients and its optimizer's memory; then steps."""
    side, batch, size, threads = sys.argv[1], *(int(word) for word in sys.argv[2:5])
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = vgg19(classes=4, size=size)
    inputs, targets = torch.randn(batch, 3, size, size), torch.randint(4, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    others = [*model.parameters(), *model.buffers(), inputs, targets]
    others += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    choices: dict[str, Any] = {}
    memory = budget.held() + int(sys.argv[5]) if len(sys.argv) > 5 else None
    offload = Offload(
        side if side in ("all", "conv", "auto") else "none", memory, None, choices, optimizer_state=0
    )
    known: dict[str, Run] = {"checkpoint": checkpointed, "save_on_cpu": saved_on_cpu, "plain": plainly}
    run = known.get(side, offload.run if offload else plainly)
    if side == "plain, kept":
        run = plainly

    def step() -> None:
        functional.cross_entropy(run(model, inputs), targets).backward()  # type: ignore[no-untyped-call]

    with kept_memory() if side == "plain, kept" else returned_memory():
        step()  # fetches memory, chooses kernels, measures
        for line in sys.stdin:
            before = _now("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            since, worked = time.perf_counter(), time.process_time()
            counter = Counter(others) if line.strip() == "count" else None
            with counter or nullcontext():
                step()
            told: dict[str, Any] = {
                "seconds": time.perf_counter() - since,
                "cpu": time.process_time() - worked,  # of all threads
                "peak": _now("VmHWM") - before,
            }
            if counter is not None:
                told["activations"] = counter.peak
                told["choices"] = choices.get("offload", {})
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            print(json.dumps(told), flush=True)
    offload.close()


def _now(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", sys.argv[4])
    main()
