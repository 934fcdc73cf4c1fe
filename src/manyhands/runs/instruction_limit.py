"""Whether a narrow precision works on this machine's CPU, and what must be set before torch is loaded.

torch's library for CPUs, oneDNN, chooses instructions by what the processor says it has. Where that is not
true the process is killed, so a child process tries first; if it dies, others try with fewer instructions.
The variable that limits them is read when the library is first used.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache

from manyhands.core.environment import LIMITS_INSTRUCTIONS
from manyhands.core.errors import UsageError
from manyhands.core.registry.launchers import LAUNCHERS, LOCAL
from manyhands.records.spec import RunSpec
from manyhands.runs.defaults import uses_cuda

# from all instructions to those of ten years ago, in which narrow types are emulated
LIMITS = ("", "AVX512_CORE_FP16", "AVX512_CORE_BF16", "AVX512_CORE", "AVX2")
SECONDS = 120.0


def prepare(spec: RunSpec, notice: Callable[[str], None]) -> RunSpec:
    """Return the spec, with a process of its own for its worker if this one cannot have what it needs.

    Called before torch is loaded here or anywhere else for this run.
    """
    if spec.precision == "full" or uses_cuda(spec.device):
        return spec
    limit = usable_limit(spec.precision, os.environ.get(LIMITS_INSTRUCTIONS, ""))
    if not limit or os.environ.get(LIMITS_INSTRUCTIONS) == limit:
        return spec
    notice(
        f"this CPU says that it has instructions for {spec.precision} which it does not execute: training "
        f"without them ({LIMITS_INSTRUCTIONS}={limit})"
    )
    os.environ[LIMITS_INSTRUCTIONS] = limit
    if LAUNCHERS[spec.launcher].in_process and "torch" in sys.modules:  # it may have been used already
        return spec.replace(launcher=LOCAL)
    return spec


@lru_cache
def usable_limit(precision: str, current: str) -> str:
    """The first limit with which the precision works, empty if none is needed; `current` is set already."""
    tried = []
    for limit in (current,) if current else LIMITS:
        how = _try(precision, limit)
        if how == "":
            return limit
        tried.append(how)
    also = f" with {LIMITS_INSTRUCTIONS}={current}" if current else ""
    raise UsageError(f"--precision {precision} does not work on this CPU{also}: a trial of it {tried[0]}")


def _try(precision: str, limit: str) -> str:
    """How a trial failed; empty if it did not."""
    environ = {**os.environ, **({LIMITS_INSTRUCTIONS: limit} if limit else {})}
    command = [sys.executable, "-m", "manyhands.devices.try_precision", precision]
    try:
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"took more than {SECONDS:.0f} seconds"
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        return f"was ended by {signal.Signals(-done.returncode).name}"
    lines = done.stderr.strip().splitlines()
    return f"failed: {lines[-1]:.200}" if lines else f"ended with exit code {done.returncode}"
