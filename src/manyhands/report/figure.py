"""A chart before it is drawn: panels with their data, a sentence, and a text alternative."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import altair as alt

from manyhands.report import palette
from manyhands.report.findings import Findings

Row = Mapping[str, Any]
View = alt.Chart | alt.LayerChart


class Panel(NamedTuple):
    """One plot of a figure: an Altair view that reads `data` by name."""

    title: str
    view: View
    data: Mapping[str, list[Row]]  # `rows` is also shown as a table
    text: str  # the text alternative, for screen readers
    height: int = 260
    step: int = 0  # height per band, for panels with a row per cell; replaces `height`
    wide: bool = False
    note: str = ""  # what lines and marks mean: a label within the plot would be crossed by others

    def chart(self, width: int | str = 420) -> View:
        """Return the view with a size; the caller adds the data."""
        height = alt.Step(self.step) if self.step else self.height
        return self.view.properties(width=width, height=height, description=self.text)


class Figure(NamedTuple):
    """The panels that answer one question."""

    sentence: str  # what these results show
    panels: list[Panel]
    left_out: str = ""  # what is not drawn, and where to find it


class Chart(NamedTuple):
    """A row of the registry of charts."""

    name: str
    heading: str
    reading: str  # how to read the chart, for any results
    figure: Callable[[Findings], Figure | None]  # None: the study has no numbers for it


def altair_chart(figure: Figure, heading: str = "") -> alt.ConcatChart:
    """Return the panels side by side as one chart, for a notebook."""
    chart, data = arranged(figure, heading)
    return chart.properties(datasets=data)


def arranged(figure: Figure, heading: str = "") -> tuple[alt.ConcatChart, dict[str, list[Row]]]:
    """Return the chart and its data separately: altair would copy and check the data row by row."""
    views: list[View] = []
    data: dict[str, list[Row]] = {}
    for number, panel in enumerate(figure.panels):
        names = {name: f"{name}{number}" for name in panel.data}
        data |= {names[name]: rows for name, rows in panel.data.items()}
        width = 900 if panel.wide else 420
        lines = textwrap.wrap(panel.note, width // 6)
        title = alt.TitleParams(panel.title or " ", subtitle=lines or alt.Undefined)
        views.append(_renamed(panel.chart(width).properties(title=title), names))
    wide = any(panel.wide for panel in figure.panels)
    chart = alt.concat(*views, columns=1 if wide else min(2, len(views)), spacing=36)
    chart = chart.resolve_scale(color="independent", shape="independent", strokeDash="independent")
    look = palette.config()
    look["padding"] = 14
    rooms = [(_legend(panel.view), 900 if panel.wide else 420) for panel in figure.panels]
    look["legend"]["columns"] = min((fitting_columns(*each) for each in rooms if len(each[0]) > 1), default=1)
    chart = chart.properties(config=look)
    if heading:
        chart = chart.properties(title=alt.TitleParams(heading, fontSize=17, offset=16))
    return chart, data


def _legend(view: View) -> list[str]:
    """The names in the legend of a view."""
    for part in [view, *getattr(view, "layer", [])]:
        color = getattr(part.encoding, "color", alt.Undefined)
        if isinstance(color, alt.Color) and color["legend"] is not None:
            return [str(name) for name in color["scale"]["domain"]]
    return []


def fitting_columns(names: Sequence[str], room: int) -> int:
    """How many columns of a legend fit, each as wide as its longest name: Vega does not wrap legends."""
    for count in range(len(names), 1, -1):
        widths = [max(7 * len(name) + 32 for name in names[first::count]) for first in range(count)]
        if sum(widths) <= room:
            return count
    return 1


def _renamed(view: View, names: Mapping[str, str]) -> View:
    """Return a copy of the view with other names for its data, so that names of panels do not collide."""
    copied = view.copy(deep=True)
    for part in [copied, *getattr(copied, "layer", [])]:
        if isinstance(part.data, alt.NamedData):
            part.data = alt.NamedData(name=names[str(part.data.name)])
    return copied


RECORDS = "the runs' result.json"  # where to find what results.csv does not contain


def limited(left: int, what: str, where: str = "results.csv") -> str:
    """`12 further runs are not drawn; all are in results.csv.`, or an empty text."""
    if left <= 0:
        return ""
    verb = "is" if left == 1 else "are"
    return f"{left:,} further {what}{'s' if left != 1 else ''} {verb} not drawn; all are in {where}."


def tidy(number: float | None) -> float | None:
    """Round to five digits, which keeps the page small; None for NaN and infinity."""
    if number is None or number != number or number in (float("inf"), float("-inf")):
        return None
    return float(f"{number:.5g}")
