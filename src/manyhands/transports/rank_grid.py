"""Ranks as a grid: one row per host, one column per local rank."""

from __future__ import annotations

from collections.abc import Sequence


def rows(hosts: Sequence[str]) -> list[tuple[int, ...]]:
    """The ranks of each host. If hosts have different numbers of ranks, each rank is a row of its own.

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
    """The ranks that have the same local rank on their hosts."""
    return list(zip(*rows(hosts), strict=True))


def group_of(rank: int, groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The group (row or column) that contains a rank."""
    return next(group for group in groups if rank in group)
