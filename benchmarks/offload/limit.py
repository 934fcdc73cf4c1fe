"""A network that cannot train under a limit of the system's, and trains under it with a budget.

    python benchmarks/offload/limit.py [--layers 12] [--batch 128] [--room 320]

The limit is a memory cgroup (root, cgroup v1 or v2) where one can be made, RLIMIT_DATA otherwise: `room` MB
above what a process holds with its model loaded. Each side is a process of its own.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from manyhands.core.allocator import returned_memory
from manyhands.offload import budget
from manyhands.offload.offloader import Offload
from manyhands.study.memory_limit import memory_group

STEPS = 3


def network(layers: int) -> nn.Sequential:
    """Convolutions of 32 channels on 32 x 32 pixels."""
    found: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(layers):
        found += [nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.Conv2d(32, 32, 3, padding=1)]
    return nn.Sequential(*found, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))


def enforce(room: int, group: Path | None) -> None:
    """From now on the system gives this process no more than `room` above what it has."""
    if group is None:
        status = Path("/proc/self/status").read_text().splitlines()
        mapped = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (mapped + room, mapped + room))
        return
    # what was there before stays charged where it was: the group counts what is new
    (group / "cgroup.procs").write_text(str(os.getpid()))


def train(arguments: argparse.Namespace) -> None:
    """One side: plain where it has no budget."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = network(arguments.layers)
    inputs, targets = torch.randn(arguments.batch, 3, 32, 32), torch.randint(4, (arguments.batch,))
    first = functional.cross_entropy(model(inputs[:2]), targets[:2])
    first.backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    room = arguments.room * 1_000_000
    enforce(room, arguments.group)
    memory = budget.held() + int(0.8 * room) if arguments.side == "auto" else None  # the system counts more
    offload = Offload("auto" if memory else "none", memory)
    since = time.perf_counter()
    with returned_memory():
        for _ in range(STEPS):
            loss = functional.cross_entropy(offload.run(model, inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    offload.close()
    print(f"trained: loss {loss.item():.6f}, {(time.perf_counter() - since) / STEPS:.2f} s per step")


def main() -> None:
    """Both sides, under the same limit."""
    parser = argparse.ArgumentParser(description="Train under a limit of the system's.")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--room", type=int, default=320, help="MB")
    parser.add_argument("--side", choices=["plain", "auto"], help=argparse.SUPPRESS)
    parser.add_argument("--group", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side is not None:
        train(arguments)
        return
    with memory_group(arguments.room * 1_000_000) as group:
        kind = "RLIMIT_DATA" if group is None else f"the memory cgroup {group}"
        print(f"{arguments.room} MB above the loaded model, held by {kind}")
        where = [] if group is None else ["--group", str(group)]
        for side in ("plain", "auto"):
            done = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--side", side, *where],
                capture_output=True,
                text=True,
                check=False,
            )
            last = (done.stdout + done.stderr).strip().splitlines()[-1:]
            print(f"{side:6} exit {done.returncode}: {last[0][:150] if last else 'killed by the system'}")


if __name__ == "__main__":
    main()
