"""The environment of a run: versions, machine and command."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class Environment(BaseModel):
    """Versions, machine and command of a run."""

    model_config = ConfigDict(frozen=True)

    manyhands: str
    python: str
    torch: str | None
    numpy: str | None
    platform: str
    host: str
    cpu: str
    cores: int
    threads: int
    device: str
    memory: int  # bytes
    commit: str | None  # of the folder in which the run was started; with "+changes" if it was not clean
    command: list[str]
    started: str


def describe(threads: int, device: str) -> Environment:
    """The environment of this process."""
    return Environment(
        manyhands=version("manyhands") or "unknown",
        python=platform.python_version(),
        torch=version("torch"),
        numpy=version("numpy"),
        platform=platform.platform(),
        host=socket.gethostname(),
        cpu=cpu_name(),
        cores=cores(),
        threads=threads,
        device=device,
        memory=memory(),
        commit=git_commit(),
        command=sys.argv,
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def version(package: str) -> str | None:
    """The installed version of a package, or None. The package is not imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


LIMITS_INSTRUCTIONS = "ONEDNN_MAX_CPU_ISA"  # read by torch's library for CPUs when it is first used
# what a process reads once, when torch is loaded or first used
READ_BY_TORCH = (LIMITS_INSTRUCTIONS, "THP_MEM_ALLOC_ENABLE")


def cores() -> int:
    """The number of cores that this process may use, which can be fewer than the machine has."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(available, _quota() or available))


def _quota() -> int | None:
    """The CPU quota of the container in cores, rounded up (cgroup v2, then v1)."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            limit = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text().strip()
            period = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if limit in ("max", "-1"):
        return None
    return -(-int(limit) // int(period))


def cpu_name() -> str:
    """The name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def memory() -> int:
    """Bytes of main memory, or 0 if the system does not say (Windows)."""
    if not hasattr(os, "sysconf"):
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory() -> int:
    """Bytes of main memory that new processes can have; all of it if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return memory()
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else memory()


def peak_memory() -> int:
    """The peak memory of this process in bytes, or 0 if the system does not say (Windows)."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def git_commit() -> str | None:
    """The git commit of the current folder, or None."""
    if shutil.which("git") is None:
        return None
    head = _git("rev-parse", "HEAD")
    if not head:
        return None
    return head + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str:
    answer = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else ""
