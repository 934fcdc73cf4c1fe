"""What the cores can give: a speed-up beyond it is implausible, and says that its baseline was slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from manyhands.core import formatting
from manyhands.core.statistics import Summary

SEVERAL = 3  # measurements of one thing: their spread says how sure they are, whatever one of them was
SLOW_BASELINE = "speed-up implausible: the baseline was slow"  # where there is no room for a sentence


def limit(
    workers: int,
    threads: int = 1,
    *,
    cores: int | None = None,
    hosts: Sequence[str] = (),
    device: str = "cpu",
) -> int:
    """The largest speed-up over one worker that this many workers can have.

    On a CPU it is the number of cores that they can keep busy: each core does at most what one worker with
    one thread does. That holds for asynchronous workers too, and servers compute nothing. A baseline with
    several threads has the same limit, because threads may bring nothing. `cores` are those of each host,
    None if nobody knows them; hyper-threads are counted among them, and two of them do less than two cores.
    `hosts` names the host of each worker, empty if all share one. On a GPU a worker has its own device.
    """
    if device != "cpu":
        return workers
    if cores is None:
        return workers * threads
    on_hosts = Counter(hosts).values() if hosts else [workers]
    return sum(min(each * threads, cores) for each in on_hosts)


def implausible(speed_up: Summary, limit: int) -> bool:
    """Whether the whole interval of a speed-up lies beyond the limit."""
    return speed_up.low > limit


def sentence(speed_up: Summary, limit: int, baseline: str, device: str = "cpu") -> str:
    """`41x one worker with one thread (35x to 48x) is implausible: 2 cores can give 2x. ...`."""
    units = formatting.plural(limit, "core" if device == "cpu" else "device")
    between = f"{times(speed_up.low)} to {times(speed_up.high)}"
    text = f"{times(speed_up.median)} {baseline} ({between}) is implausible: {units} can give"
    if speed_up.n >= SEVERAL:
        why = (
            "Either the baseline was slow throughout, or a worker's share of the batch fits a cache that the"
        )
        return f"{text} {limit}x. {why} whole batch does not."
    return f"{text} {limit}x. The baseline was probably slow: measure both again on an idle machine."


def times(ratio: float) -> str:
    """`1.93x`, `41x`."""
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:,.0f}x"
