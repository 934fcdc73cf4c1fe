"""Seconds from a worker's failure to the end of the run: every fault on every transport.

    python benchmarks/faults/run.py [--transports shm,torch,mpi] [--workers 2] [--json]

The table is in docs/faults.md. A hang is noticed after its deadline, here `--timeout 2`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from pathlib import Path

import manyhands
from manyhands.core.errors import ManyhandsError
from manyhands.engine.fault_injection import faults

FAULTS = ["raise", "exit", "SIGKILL", "SIGSEGV", "SIGILL", "oom", "hang:data", "hang:collective", "SIGSTOP"]
TIMEOUT = 2.0  # seconds


def time_to_end(fault: str, transport: str, workers: int) -> tuple[float, str]:
    """Seconds from the fault to the error, and the first line of its message."""
    kind, _, where = fault.partition(":")
    os.environ[faults.VARIABLE] = f"{kind}@{workers - 1}:8" + (f":{where}" if where else "")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        try:
            manyhands.train(
                "quadratic",
                workers=workers,
                transport=transport,
                timeout=TIMEOUT,
                epochs=10_000,
                out=out,
                quiet=True,
            )
        except ManyhandsError as error:
            ended, message = time.time(), str(error)
        else:
            raise AssertionError(f"{fault} on {transport}: the run continued")
        finally:
            del os.environ[faults.VARIABLE]
        logs = "".join(path.read_text() for path in (out / "logs").glob("rank-*.log"))
    injected = re.search(r"^fault: \w+ at ([\d.]+)$", logs, re.MULTILINE)
    assert injected is not None, logs
    return ended - float(injected[1]), message.splitlines()[0]


def main() -> None:
    """Print a table in Markdown, or JSON."""
    parser = argparse.ArgumentParser(description="Faults x transports.")
    parser.add_argument("--transports", default="shm,torch,mpi")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    transports = arguments.transports.split(",")
    results = {
        fault: {name: time_to_end(fault, name, arguments.workers) for name in transports} for fault in FAULTS
    }
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    print("| fault | " + " | ".join(transports) + " |\n|---|" + "---|" * len(transports))
    for fault, row in results.items():
        print(f"| {fault} | " + " | ".join(f"{row[name][0]:.2f} s" for name in transports) + " |")


if __name__ == "__main__":
    main()
