"""Law 5: every fault gives one message and leaves nothing behind, on every transport and launcher.

Every kind of exit under every launcher is in launchers/test_members.py, and waiting for a dead worker on
every transport in transports/test_members.py: here they are combined, with some faults of each kind.
"""

from __future__ import annotations

import os
import re
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

import manyhands as mh
from conftest import AS_ROOT, called
from manyhands.core.errors import WorkerFailedError
from manyhands.engine.fault_injection import faults
from manyhands.testing.launchers import processes_below

BIN = Path(sys.executable).parent
WORKER = r"worker 1 of 2 \(host \S+, pid \d+\) "
OPERATION = r"in (barrier|all_reduce) \d+"
FAULTS = {
    "raise": WORKER + r"raised ScriptedError: raised by script at rank 1, step 8 at step 8, " + OPERATION,
    "raise:backward": WORKER
    + r"raised ScriptedError: raised by script at rank 1, step 8 at step 8, in backward",
    "exit": WORKER + r"exited with code 3 at step 8, " + OPERATION,
    "SIGKILL": WORKER
    + r"was killed by signal 9 \(SIGKILL, often because memory ran out\) at step 8, "
    + OPERATION,
    "SIGSEGV": WORKER
    + r"was killed by signal 11 \(SIGSEGV, a crash in native code\) at step 8, "
    + OPERATION,
    "SIGILL": WORKER
    + r"was killed by signal 4 \(SIGILL, an instruction .* not support\) at step 8, "
    + OPERATION,
    "oom": WORKER + r"raised MemoryError( \(out of memory\))? at step 8, " + OPERATION,
    "hang:data": WORKER + r"has been hanging for \d[\d.]* s at step 8, in data",
    "hang:collective": WORKER + r"has been hanging for \d[\d.]* s at step 8, " + OPERATION,
    "SIGSTOP": WORKER + r"has been stopped \(SIGSTOP\) for \d[\d.]* s at step 8, " + OPERATION,
}
HANGS = ("hang:data", "hang:collective", "SIGSTOP")
ON_SHM = [(fault, "shm") for fault in FAULTS]
# Every fault, every transport, and on each transport a death and a hang: a fault is noticed by the launcher,
# and what the others wait in is the transport's. `make soak` runs the other pairs.
ON_TORCH = [(fault, "torch") for fault in ("SIGKILL", "hang:collective")]
ON_MPI = [(fault, "mpi") for fault in ("SIGSEGV", "hang:data")] if find_spec("mpi4py") else []
PAIRS = ON_SHM + ON_TORCH + ON_MPI
OTHER_PAIRS = [
    pytest.param(fault, transport, marks=pytest.mark.soak)
    for fault in FAULTS
    for transport in ("torch", *(["mpi"] if find_spec("mpi4py") else []))
    if (fault, transport) not in PAIRS
]
# Two at a time, Open MPI's files are elsewhere (see conftest.py): what is in /dev/shm is not ours.
NAMES_OF_OTHERS = () if "PYTEST_XDIST_WORKER" in os.environ else ("sm_segment", "vader", "torch_")
TIMEOUT = 2.0  # seconds: a shared machine may stall a process for one


def script(fault: str) -> str:
    kind, _, where = fault.partition(":")
    return f"{kind}@1:8" + (f":{where}" if where else "")


def injected_at(folder: Path) -> float:
    """When the fault was injected, from the worker's own log."""
    logs = "".join(path.read_text() for path in (folder / "logs").glob("rank-*.log"))
    match = re.search(r"^fault: \w+ at ([\d.]+)$", logs, re.MULTILINE)
    assert match, logs
    return float(match[1])


def left_behind(here: Path) -> list[str]:
    """Processes that run in this folder, and names in shared memory, a moment after the end."""
    for _ in range(40):
        processes = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and str(here) in str((entry / "cwd").readlink()):
                    processes += (
                        [entry.name] if int(entry.name) not in (os.getpid(), *_fork_servers()) else []
                    )
            except OSError:
                continue
        found = processes + [str(path) for path in Path("/dev/shm").glob("*") if _ours(path)]
        if not found:
            break
        time.sleep(0.05)
    return found


def _fork_servers() -> list[int]:
    """The fork server stays for the next run of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(child) for child in children]


def _ours(path: Path) -> bool:
    """A name of ours, or of a process that is gone: other tests may run at the same time."""
    maker = re.match(r"manyhands-(\d+)-", path.name)
    if maker and int(maker[1]) not in processes_below(os.getpid()) and Path("/proc", maker[1]).exists():
        return False
    return path.name.startswith(("manyhands", *NAMES_OF_OTHERS))


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "transport"), [*PAIRS, *OTHER_PAIRS])
def test_a_fault_ends_the_run(
    fault: str, transport: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(faults.VARIABLE, script(fault))
    with pytest.raises(WorkerFailedError) as caught:
        mh.train(
            "quadratic",
            workers=2,
            transport=transport,
            timeout=TIMEOUT,
            epochs=10_000,
            out=here / "run",
            quiet=True,
        )
    seconds = time.time() - injected_at(here / "run")
    first, *rest = str(caught.value).splitlines()
    assert re.fullmatch(FAULTS[fault], first), str(caught.value)
    assert re.fullmatch(r"worker 0 was (waiting )?in \w+ [\d,]+.*; it was stopped after .*", rest[-2]), rest
    assert rest[-1].endswith(f" with: manyhands train --resume {here / 'run'}")
    assert seconds < 5 + (TIMEOUT if fault in HANGS else 0)
    assert left_behind(here) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "starter"),
    [
        pytest.param("SIGKILL", "torchrun", marks=pytest.mark.soak),
        pytest.param("raise", "torchrun", marks=pytest.mark.soak),
        *([("hang:data", "mpirun")] if (BIN / "mpirun").exists() else []),
        *([pytest.param("SIGKILL", "mpirun", marks=pytest.mark.soak)] if (BIN / "mpirun").exists() else []),
    ],
)
def test_a_fault_under_a_starter(fault: str, starter: str, tmp_path: Path) -> None:
    """The starter reports the signal; we report the worker, the step and the operation."""
    train = ["-m", "manyhands", "train", "quadratic", "--epochs", "10000", "--timeout", str(TIMEOUT)]
    words = {
        "torchrun": [str(BIN / "torchrun"), "--nproc-per-node", "2", "--master-port", "29521", *train],
        "mpirun": [str(BIN / "mpirun"), "-n", "2", "--map-by", ":OVERSUBSCRIBE", sys.executable, *train],
    }[starter]
    answer = called(words, tmp_path, **AS_ROOT, **{faults.VARIABLE: script(fault)})
    assert answer.code != 0
    expected = {
        "raise": FAULTS["raise"],
        "SIGKILL": WORKER
        + r"was lost \(its connection closed: killed, crashed or exited\) at step 8, "
        + OPERATION,
        "hang:data": FAULTS["hang:data"],
    }[fault]
    assert len(re.findall(rf"^error: {expected}$", answer.err, re.MULTILINE)) == 1, answer.err
    assert left_behind(tmp_path) == []


@pytest.mark.soak
def test_the_first_rank_dies_under_torchrun(tmp_path: Path) -> None:
    """Then no process supervises the others; rank 1 still says what happened.

    launchers/test_env.py has the same without a torchrun.
    """
    train = ["-m", "manyhands", "train", "quadratic", "--epochs", "10000"]
    words = [BIN / "torchrun", "--nproc-per-node", "3", "--master-port", "29523", *train]
    answer = called(words, tmp_path, **{faults.VARIABLE: "SIGKILL@0:8"})
    assert answer.code != 0
    assert (
        len(re.findall(r"^error: worker 0 of 3 \(host \S+, pid \d+\) was lost", answer.err, re.MULTILINE))
        == 1
    )
    assert left_behind(tmp_path) == []
