"""How long an all-reduce takes from 4 KB to 64 MB: shm against gloo, MPI and a plain copy of the same bytes.

    python benchmarks/data_parallel/collectives.py [--workers 2] [--rounds 5] [--json]

Every round starts each transport in turn with two processes and times all sizes; the best median of the
rounds is shown. `reduce` is what the arena does with gradients that lie in shared memory already: a barrier,
each worker sums its slice, a barrier. `copy` is `Tensor.copy_` of the same bytes by one process, alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec

import torch

from manyhands.launchers.local import Local
from manyhands.launchers.mpi import Mpi
from manyhands.place import Place
from manyhands.transports.connect import connect

SIZES = [4 * 2**10, 32 * 2**10, 256 * 2**10, 2 * 2**20, 16 * 2**20, 64 * 2**20]  # bytes


def timed(call: Callable[[], object], nbytes: int) -> float:
    """Seconds of one call: the median of as many as a third of a second or so allows."""
    times = []
    for _ in range(max(7, min(300, 2**27 // nbytes))):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def all_reduces(place: Place, name: str) -> list[float]:
    """At every rank: one transport, all sizes."""
    torch.set_num_threads(1)
    transport = connect(name, place)
    found = []
    for nbytes in SIZES:
        tensor = torch.zeros(nbytes // 4)
        transport.barrier()
        found.append(timed(lambda tensor=tensor: transport.all_reduce(tensor), nbytes))  # type: ignore[misc]
    transport.close()
    return found


def arena_reduces(place: Place, name: str) -> list[float]:
    """At every rank: what a step of the arena costs beyond computing."""
    torch.set_num_threads(1)
    transport = connect("shm", place)
    found = []
    for nbytes in SIZES:
        count = nbytes // 4
        rows = (
            transport.share(f"rows-{nbytes}", nbytes * place.size).view(torch.float32).view(place.size, count)
        )
        rows[place.rank].fill_(1.0)
        low, high = (index * count // place.size for index in (place.rank, place.rank + 1))
        parts, out = [row[low:high] for row in rows], torch.empty(high - low)

        def reduce(parts: list[torch.Tensor] = parts, out: torch.Tensor = out) -> None:
            transport.barrier()
            transport.add_shared(parts, out)
            transport.barrier()

        reduce()
        found.append(timed(reduce, nbytes))
    transport.close()
    return found


def copies(place: Place, name: str) -> list[float]:
    """One process alone: a plain copy."""
    torch.set_num_threads(1)
    found = []
    for nbytes in SIZES:
        source, target = torch.ones(nbytes // 4), torch.zeros(nbytes // 4)
        found.append(timed(lambda source=source, target=target: target.copy_(source), nbytes))  # type: ignore[misc]
    return found


def main() -> None:
    """Interleave the rounds and print microseconds and bandwidths."""
    parser = argparse.ArgumentParser(description="All-reduce by transport and size.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    workers = arguments.workers
    sides: dict[str, Callable[[], list[float]]] = {
        "copy": lambda: Local().launch(copies, 1, "")[0],
        "reduce": lambda: Local().launch(arena_reduces, workers, "")[0],
        "shm": lambda: Local().launch(all_reduces, workers, "shm")[0],
        "gloo": lambda: Local().launch(all_reduces, workers, "torch")[0],
    }
    if find_spec("mpi4py") is not None:
        sides["mpi"] = lambda: Mpi().launch(all_reduces, workers, "mpi")[0]
    rounds: dict[str, list[list[float]]] = {name: [] for name in sides}
    for _ in range(arguments.rounds):
        for name, side in sides.items():
            rounds[name].append(side())
    best = {name: [min(times) for times in zip(*found, strict=True)] for name, found in rounds.items()}
    if arguments.json:
        print(json.dumps({"bytes": SIZES, "seconds": best}, indent=2))
        return
    print(f"{'bytes':>12}" + "".join(f"{name:>12}" for name in best) + "   shm / copy   gloo / shm")
    for number, nbytes in enumerate(SIZES):
        cells = "".join(f"{best[name][number] * 1e6:>9,.0f} us" for name in best)
        shm = best["shm"][number]
        ratios = f"{shm / best['copy'][number]:>12.1f}x{best['gloo'][number] / shm:>12.1f}x"
        print(f"{nbytes:>12,}{cells} {ratios}")


if __name__ == "__main__":
    main()
