"""The series of a claim's picture as plain numbers; `report` draws them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Dot(NamedTuple):
    """One point of a line, with its interval if it has one."""

    x: float | str
    y: float
    low: float | None = None
    high: float | None = None


class Line(NamedTuple):
    """Points that belong together."""

    name: str
    dots: Sequence[Dot]
    joined: bool = True  # by a line
    marked: bool = True  # by symbols


class Plot(NamedTuple):
    """One panel: what was found here, or what was published."""

    title: str
    x: str  # titles of the axes
    y: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False
    percent: bool = False  # y is a share
    level: float | None = None  # a dashed line across, such as the threshold
    zero: bool = False  # whether the axis of y begins at 0
