"""How fast the machine is at this moment: a fixed piece of work on all cores at once, timed between runs."""

from __future__ import annotations

import statistics
import threading
import time

import numpy as np

from manyhands.core import environment

ROUNDS = 7
REST = 0.02  # seconds between rounds: a machine's hiccups last longer than one of them
CALLS = 100  # in a round, by each thread: about 15 ms
_NUMBERS = 131_072  # as much as a core keeps close to itself, and few calls of the interpreter


def measure(rounds: int = ROUNDS) -> float:
    """Seconds that the work takes, the median of a few rounds; on a core that is shared it takes longer."""
    cores = environment.cores()
    together = threading.Barrier(cores)
    spans: list[list[tuple[float, float]]] = [[] for _ in range(rounds)]

    # ufuncs work without the interpreter's lock, so that a thread per core keeps all of them busy
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
