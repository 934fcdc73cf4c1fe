"""How long an all-reduce takes from 4 KB to 64 MB: shm against gloo, MPI and a plain copy of the same bytes.

    python benchmarks/data_parallel/collectives.py [--workers 2] [--rounds 5] [--json]

Every round starts each transport in turn with two processes and times all sizes; the best median of the
rounds is shown. `reduce` is what the arena does with gradients that lie in shared memory already: a barrier,
each worker sums its slice, a barrier. `copy` is `Tensor.copy_` of the same bytes by one process, alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from importlib.util import find_spec

from exchanges import SIZES, all_reduces, arena_reduces, copies

from manyhands.launchers.local import LocalLauncher
from manyhands.launchers.mpi import MpiLauncher


def main() -> None:
    """Interleave the rounds and print microseconds and bandwidths."""
    parser = argparse.ArgumentParser(description="All-reduce by transport and size.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    workers = arguments.workers
    sides: dict[str, Callable[[], list[float]]] = {
        "copy": lambda: LocalLauncher().launch(copies, 1, "")[0],
        "reduce": lambda: LocalLauncher().launch(arena_reduces, workers, "")[0],
        "shm": lambda: LocalLauncher().launch(all_reduces, workers, "shm")[0],
        "gloo": lambda: LocalLauncher().launch(all_reduces, workers, "torch")[0],
    }
    if find_spec("mpi4py") is not None:
        sides["mpi"] = lambda: MpiLauncher().launch(all_reduces, workers, "mpi")[0]
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
