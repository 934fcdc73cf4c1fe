"""What a chart is before it is drawn: panels of numbers with a sentence, each readable without seeing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import altair as alt

from manyhands.report import palette
from manyhands.report.findings import Findings

Row = Mapping[str, Any]
View = alt.Chart | alt.LayerChart


class Panel(NamedTuple):
    """One drawing of a figure: a view that reads `data` by name."""

    title: str
    view: View
    data: Mapping[str, list[Row]]  # the first is what the table shows
    text: str  # what somebody who cannot see it is told
    height: int = 260
    step: int = 0  # of rows that are bands: the height per row, so that fewer rows need less
    wide: bool = False

    def chart(self, width: int | str = 420) -> View:
        """The view by itself, with a size; its data is added by whoever puts it on paper."""
        height = alt.Step(self.step) if self.step else self.height
        return self.view.properties(width=width, height=height, description=self.text)


class Figure(NamedTuple):
    """What one question is answered with."""

    sentence: str  # what to see, in these results
    panels: list[Panel]
    left_out: str = ""  # what is not drawn, and where it is


class Chart(NamedTuple):
    """A row of the registry."""

    name: str
    heading: str
    reading: str  # how the drawing is read, whatever the results
    figure: Callable[[Findings], Figure | None]  # none: the study has nothing to show here


def altair_chart(figure: Figure, heading: str = "") -> alt.ConcatChart:
    """The panels side by side as one chart that shows in a notebook."""
    chart, data = arranged(figure, heading)
    return chart.properties(datasets=data)


def arranged(figure: Figure, heading: str = "") -> tuple[alt.ConcatChart, dict[str, list[Row]]]:
    """The same with its data apart, which altair would copy and look through row by row."""
    views: list[View] = []
    data: dict[str, list[Row]] = {}
    for number, panel in enumerate(figure.panels):
        names = {name: f"{name}{number}" for name in panel.data}
        data |= {names[name]: rows for name, rows in panel.data.items()}
        width = 900 if panel.wide else 420
        views.append(_renamed(panel.chart(width).properties(title=panel.title), names))
    wide = any(panel.wide for panel in figure.panels)
    chart = alt.concat(*views, columns=1 if wide else min(2, len(views)), spacing=36)
    chart = chart.resolve_scale(color="independent", shape="independent", strokeDash="independent")
    look = palette.config()
    look["padding"] = 14
    look["legend"]["columns"] = 7 if wide else 4  # a longer one would push the panels apart
    chart = chart.properties(config=look)
    if heading:
        chart = chart.properties(title=alt.TitleParams(heading, fontSize=17, offset=16))
    return chart, data


def _renamed(view: View, names: Mapping[str, str]) -> View:
    """The same view reading its rows under other names, so that panels do not read each other's."""
    copied = view.copy(deep=True)
    for part in [copied, *getattr(copied, "layer", [])]:
        if isinstance(part.data, alt.NamedData):
            part.data = alt.NamedData(name=names[str(part.data.name)])
    return copied


RECORDS = "the runs' result.json"  # what is no number of a table


def limited(left: int, what: str, where: str = "results.csv") -> str:
    """`12 further runs are not drawn; all are in results.csv.`, or nothing."""
    if left <= 0:
        return ""
    verb = "is" if left == 1 else "are"
    return f"{left:,} further {what}{'s' if left != 1 else ''} {verb} not drawn; all are in {where}."


def tidy(number: float | None) -> float | None:
    """Five digits are more than anybody sees, and keep the page small."""
    if number is None or number != number or number in (float("inf"), float("-inf")):
        return None
    return float(f"{number:.5g}")
