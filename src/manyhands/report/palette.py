"""Colors, shapes and dashes that color-blind readers can tell apart, and the theme of all charts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from manyhands.core.registry.strategies import ONE_WORKER

# Six colors of Okabe and Ito (2008) and four more, with gray for the baseline: eleven names without a repeat.
NEUTRAL = "#7a7a7a"
COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#6f3fa8",
    "#84a812",
    "#a3123f",
    "#7a4f1d",
)
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 4], [1, 3], [10, 4])

# Cool colors are work, warm colors are lost time.
PHASES = {
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "optimizer": "#009e73",
    "communication": "#d55e00",
    "wait": "#e69f00",
    "data": "#cc79a7",
    "other": "#9a9a9a",
    "evaluation": "#c4c4c4",
    "checkpoint": "#b0a090",
}
HEAT = ("#0b3c6f", "#2e7ebc", "#8fc1e3", "#e6eef5")  # fast to slow; readable in grayscale

INK, QUIET, LINE, PAPER = "#1d2126", "#5d6670", "#dfe3e8", "#ffffff"
FONT = "Inter, 'Source Sans 3', 'Segoe UI', 'Helvetica Neue', 'Liberation Sans', Arial, sans-serif"


# On the page colors are CSS variables: light, dark and print differ, and no chart has to be drawn again.
VARIABLES = {
    NEUTRAL: "var(--neutral)",
    "#0072b2": "var(--blue)",
    "#d55e00": "var(--vermilion)",
    "#009e73": "var(--green)",
    "#cc79a7": "var(--pink)",
    "#e69f00": "var(--orange)",
    "#56b4e9": "var(--sky)",
    "#6f3fa8": "var(--violet)",
    "#84a812": "var(--lime)",
    "#a3123f": "var(--wine)",
    "#7a4f1d": "var(--brown)",
    "#9a9a9a": "var(--gray)",
    QUIET: "var(--quiet)",
    INK: "var(--ink)",
}


class Look(NamedTuple):
    """Color, shape and dash of one name, the same in all charts of a report."""

    color: str
    shape: str
    dash: list[int]


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Return a look for every name; `single`, the baseline, is gray."""
    found: dict[str, Look] = {}
    taken = 0
    for name in dict.fromkeys(names):
        if name == ONE_WORKER:
            found[name] = Look(NEUTRAL, "circle", [1, 0])
            continue
        turn = taken // len(COLORS)  # when colors are used again, shapes are shifted
        found[name] = Look(
            COLORS[taken % len(COLORS)],
            SHAPES[(taken + 1 + 3 * turn) % len(SHAPES)],
            DASHES[turn % len(DASHES)],
        )
        taken += 1
    return found


def config(
    *,
    ink: str = INK,
    quiet: str = QUIET,
    line: str = LINE,
    paper: str = PAPER,
    background: str = PAPER,
) -> dict[str, Any]:
    """Return the theme as a Vega-Lite config; the page passes CSS variables as colors."""
    small, plain = 11, 12
    return {
        "background": background,
        "font": FONT,
        "padding": {"left": 4, "top": 6, "right": 14, "bottom": 4},
        "view": {"stroke": None},
        "axis": {
            "labelColor": quiet,
            "titleColor": quiet,
            "titleFontWeight": "normal",
            "titleFontSize": plain,
            "labelFontSize": small,
            "gridColor": line,
            "domainColor": line,
            "tickColor": line,
            "titlePadding": 8,
            "labelOverlap": "greedy",
            "labelSeparation": 6,
            "labelLimit": 0,  # a name that is cut off may look like another one
        },
        "axisX": {"grid": False, "tickSize": 4},
        "axisY": {"domain": False, "ticks": False},
        "legend": {
            "orient": "top",
            "title": None,
            "labelColor": ink,
            "labelFontSize": plain,
            "symbolStrokeWidth": 2,
            "labelLimit": 0,
            "titleColor": quiet,
            "titleFontWeight": "normal",
            "columnPadding": 14,
            "offset": 10,
        },
        "title": {
            "color": ink,
            "fontSize": 13,
            "anchor": "start",
            "fontWeight": 600,
            "offset": 8,
            "subtitleColor": quiet,
            "subtitleFontSize": small,
        },
        "style": {
            "ink": {"color": ink, "stroke": ink, "fill": ink},
            "label": {"color": ink, "fill": ink, "fontSize": small},
            "note": {"color": quiet, "fill": quiet, "fontSize": small},
            "guide": {
                "color": quiet,
                "stroke": quiet,
                "strokeDash": [4, 4],
                "strokeWidth": 1.2,
                "strokeOpacity": 0.8,
            },
            "second-guide": {"color": quiet, "stroke": quiet, "strokeDash": [1, 4], "strokeWidth": 2.2},
            "gap": {"stroke": paper, "strokeWidth": 0.6},
        },
        "line": {"strokeWidth": 2, "strokeJoin": "round"},
        "point": {"filled": True, "size": 60, "opacity": 1},
        "bar": {"cornerRadiusEnd": 2},
    }


def domain(names: Sequence[str], known: dict[str, Look]) -> tuple[list[str], list[str], list[str], list[Any]]:
    """Return the names in the order of `known`, with their colors, shapes and dashes."""
    order = [name for name in known if name in set(names)]
    drawn = [known[name] for name in order]
    return (
        order,
        [look.color for look in drawn],
        [look.shape for look in drawn],
        [look.dash for look in drawn],
    )
