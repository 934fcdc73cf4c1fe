"""Try a narrow precision on this CPU, in a process of its own: where it is not usable, the process dies.

    python -m manyhands.devices.try_precision bf16

Some processors, and more virtual machines, advertise instructions that they do not execute: the kernel ends
such a process with SIGILL, which no program can catch and go on.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def main(name: str) -> None:
    """Compute forward and backward of what models are made of, as large as fast kernels want it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2)
    )
    rows = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))
    attention = nn.MultiheadAttention(64, 4, batch_first=True)
    with torch.autocast("cpu", DTYPES[name]):
        found = images(torch.randn(8, 16, 16, 16)).flatten(2).transpose(1, 2)
        found = rows(found)
        found = found + attention(found, found, found)[0]
        loss = found.float().square().mean()
    loss.backward()
    gradients = [p.grad for part in (images, rows, attention) for p in part.parameters()]
    if not all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients):
        raise SystemExit(f"{name} gives numbers that are not finite")


if __name__ == "__main__":
    main(sys.argv[1])
