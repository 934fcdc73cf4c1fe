"""Worker functions of these tests, in a module that workers can import."""

from __future__ import annotations

import os
import signal
import sys
import time

from launchers.listening import listening
from manyhands.core.errors import InterruptedRunError
from manyhands.core.rank_info import RankInfo, RankStatus
from manyhands.engine.fault_injection.faults import Fault
from manyhands.testing.worker_functions import wait_until


def variable(info: RankInfo, name: str) -> str | None:
    return os.environ.get(name)


def speak(info: RankInfo) -> None:
    print(f"rank {info.rank}, grüezi")
    os.write(2, b"from C\n")


def exhaust(info: RankInfo) -> None:
    Fault("oom", 0, 0).strike()


def late_to_exchange(info: RankInfo) -> None:
    info.channel.watch(lambda: RankStatus(0, "other", "", 1))
    if info.rank == 1:
        time.sleep(300)
    info.channel.exchange(None)


def sleep_unwatched(info: RankInfo) -> None:
    time.sleep(0.8)


def save_slowly(info: RankInfo) -> None:
    info.channel.watch(lambda: RankStatus(3, "checkpoint" if info.rank == 0 else "forward", "", 1))
    time.sleep(0.3)
    if info.rank == 0:
        time.sleep(1.0)
        info.channel.tell("saved")
    raise InterruptedRunError(f"rank {info.rank} was interrupted", signal.SIGTERM)


def is_imported(info: RankInfo, module: str) -> bool:
    return module in sys.modules


def multiply(info: RankInfo, threads: int) -> tuple[int, bool]:
    import torch

    torch.set_num_threads(threads)
    matrix = torch.randn(1024, 1024, dtype=torch.float64)
    product = matrix @ matrix
    return torch.get_num_threads(), bool(torch.allclose(product[:4], matrix[:4] @ matrix))


def sum_by_mpi(info: RankInfo) -> int:
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.allreduce(info.rank + 1))


def listening_addresses(info: RankInfo, leader: int, *more: str) -> list[str]:
    """The addresses at which this process and its leader listen, with each transport in turn."""
    from manyhands.transports.connect import connect

    found: set[str] = set()
    for name in ("shm", "torch", *more):
        transport = connect(name, info, timeout=60)
        transport.barrier()
        found |= listening() | listening(leader)
        transport.barrier()
        transport.close()
    return sorted(found)


def lose_all(info: RankInfo) -> None:
    """Rank 2 exits; when the others know that, rank 1 exits; when rank 0 knows that, it returns."""
    info.channel.watch(lambda: RankStatus(120, "backward", "", time.monotonic_ns()))
    if info.rank == 2:
        time.sleep(0.3)
        os._exit(3)
    wait_until(lambda: 2 in info.channel.gone)
    if info.rank == 1:
        os._exit(3)
    wait_until(lambda: info.channel.gone >= {1, 2})


def lose_with_facts(info: RankInfo, count: int) -> dict[str, object]:
    """Rank 2 sends many messages before it fails."""
    info.channel.watch(lambda: RankStatus(120, "backward", "", time.monotonic_ns()))
    if info.rank == 2:
        time.sleep(0.2)
        for number in range(count):
            info.channel.tell(number)
        info.channel.post("fact", 1)
        raise ValueError("enough")
    wait_until(lambda: 2 in info.channel.gone)
    return info.channel.posted


def struggle(info: RankInfo, until: float) -> tuple[bool, list[object]]:
    """Make steps until a time of day, while others die; exchange once before that and once after."""
    channel, steps = info.channel, 0
    channel.watch(lambda: RankStatus(steps, "forward", "", steps))
    channel.tell((info.rank, os.getpid()))
    if info.joining:
        channel.joined()
    else:
        channel.exchange(None)
    while time.time() < until:
        time.sleep(0.002)
        steps += 1
    return info.joining, channel.exchange(info.rank)
