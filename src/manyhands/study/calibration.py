"""How fast the machine is right now: a fixed amount of work on all cores at once, timed between runs."""

from __future__ import annotations

import statistics
import threading
import time

import numpy as np

from manyhands.core import environment

ROUNDS = 7  # the median of their times counts
REST = 0.02  # seconds between rounds: when a machine is disturbed, that lasts longer than one round
CALLS = 100  # per round and thread: about 15 ms
_NUMBERS = 131_072  # few enough for a core's cache, and enough that the interpreter takes little of the time


def measure(rounds: int = ROUNDS) -> float:
    """Return the median time of the work in seconds; it takes longer on cores that are shared."""
    cores = environment.cores()
    together = threading.Barrier(cores)
    spans: list[list[tuple[float, float]]] = [[] for _ in range(rounds)]

    # ufuncs release the GIL, so that one thread per core keeps all cores busy
    def work() -> None:
        numbers = np.linspace(0.1, 1.0, _NUMBERS)
        out = np.empty_like(numbers)
        for number in range(rounds):
            time.sleep(REST)
            together.wait()
            began = time.perf_counter()
            for _ in range(CALLS):
                np.exp(numbers, out=out)
            spans[number].append((began, time.perf_counter()))

    threads = [threading.Thread(target=work, name="calibration", daemon=True) for _ in range(cores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statistics.median(max(end for _, end in each) - min(begin for begin, _ in each) for each in spans)
