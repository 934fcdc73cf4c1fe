"""Ranks as a grid: a row for each host, a column for the workers of the same number on all hosts."""

from __future__ import annotations

from collections.abc import Sequence


def rows(hosts: Sequence[str]) -> list[tuple[int, ...]]:
    """The ranks of each host; each rank alone where hosts have different numbers of them.

    >>> rows(["a", "b", "a", "b"])
    [(0, 2), (1, 3)]
    >>> rows(["a", "b", "b"])
    [(0,), (1,), (2,)]
    """
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    if len({len(ranks) for ranks in found.values()}) > 1:
        return [(rank,) for rank in range(len(hosts))]
    return [tuple(ranks) for ranks in found.values()]


def columns(hosts: Sequence[str]) -> list[tuple[int, ...]]:
    """The ranks that have the same number on their hosts."""
    return list(zip(*rows(hosts), strict=True))


def line_of(rank: int, lines: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The row or column in which a rank stands."""
    return next(line for line in lines if rank in line)
