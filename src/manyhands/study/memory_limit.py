"""Train under a memory limit of the system's: with all activations kept, and with offload.

Each side is a process of its own in a memory cgroup. The system ends a process that needs more, and counts
that; so a side that failed for another reason is not taken for one that did not fit.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from manyhands.callbacks.base import Callback
from manyhands.claims import limit_trial
from manyhands.claims.limit_trial import LimitedSide, LimitTrial
from manyhands.core.errors import ManyhandsError
from manyhands.records.record import RunRecord
from manyhands.records.spec import RunSpec
from manyhands.records.study_results import Results
from manyhands.study.attempt import attempt

GROUPS = Path("/sys/fs/cgroup")
STEPS = 2  # of each side: the second has gradients and the state of the optimizer
LONGEST = 900.0  # seconds of one side
KEPT, MOVED = "none", "auto"
_LIMITS = ("memory.limit_in_bytes", "memory.max")  # cgroup v1, v2
_COUNTS = ("memory.oom_control", "memory.events")


def try_limit(results: Results) -> LimitTrial:
    """Try both sides between what they needed without a limit, and write the outcome beside the results."""
    trial = _trial(results)
    limit_trial.write(results.folder, [trial])
    return trial


def _trial(results: Results) -> LimitTrial:
    kept = [record for record in results.records if record.spec.offload == KEPT]
    moved = [record for record in results.records if record.spec.offload == MOVED]
    if not kept or not moved:
        return LimitTrial(problem=f"a trial needs the memory of runs with offload {KEPT} and {MOVED}")
    limit = math.isqrt(_memory(kept) * _memory(moved))
    with memory_group(limit) as group:
        if group is None:
            return LimitTrial(problem="no memory cgroup can be made here: that needs root")
        few = STEPS * (kept[0].spec.batch or 1)
        spec = kept[0].spec.replace(samples=few, seconds=None, evaluate_every=0.0, timeout=LONGEST)
        sides = (spec, spec.replace(offload=MOVED))
        plain, offloaded = (_side(side, results.folder / f"limit-{side.offload}", group) for side in sides)
    return LimitTrial(limit=limit, enforced_by="a memory cgroup", plain=plain, offloaded=offloaded)


def _memory(records: Sequence[RunRecord]) -> int:
    return max(max(record.memory or [record.peak_memory]) for record in records)


@contextmanager
def memory_group(limit: int) -> Iterator[Path | None]:
    """A memory cgroup with this limit, of version 1 or 2; None where we may not make one."""
    group = _make(limit)
    try:
        yield group
    finally:
        if group is not None:
            group.rmdir()


def _make(limit: int) -> Path | None:
    for parent in (GROUPS / "memory", GROUPS):
        group = parent / f"manyhands-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        for name in _LIMITS:
            if (group / name).exists():
                (group / name).write_text(str(limit))
                return group
        group.rmdir()
    return None


def _side(spec: RunSpec, folder: Path, group: Path) -> LimitedSide:
    """Train in a process of the group; its folder is not kept."""
    before = killed(group)
    command = [sys.executable, "-m", __name__, str(group), spec.model_dump_json(), str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST)
        code, said = done.returncode, (done.stdout + done.stderr).strip()
    except subprocess.TimeoutExpired:
        code, said = 1, f"not done after {LONGEST:.0f} seconds"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    last = said.splitlines()[-1][:200] if said else ""
    return LimitedSide(exit=code, said=last, killed=killed(group) > before)


def killed(group: Path) -> int:
    """How many processes of the group the system has ended because of its limit."""
    for name in _COUNTS:
        if (group / name).exists():
            lines = (group / name).read_text().splitlines()
            return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return 0


def _train(group: Path, spec: RunSpec, folder: Path) -> None:
    """Join the group, so that everything from now on counts there, and train."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    record = attempt(spec, folder, Callback())
    print(f"trained {record.steps} steps, loss {record.loss}")


if __name__ == "__main__":
    try:
        _train(Path(sys.argv[1]), RunSpec.model_validate_json(sys.argv[2]), Path(sys.argv[3]))
    except ManyhandsError as error:
        sys.exit(str(error))
