"""Results in a notebook: records, a data frame and charts."""

from __future__ import annotations

from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.core import formatting
from manyhands.core.errors import UsageError, unknown
from manyhands.records.record import RunRecord
from manyhands.records.run_folder import RunFolder
from manyhands.records.study_results import Results, StudyFolder

if TYPE_CHECKING:
    import altair as alt
    import pandas as pd

    from manyhands.report.figure import Figure
    from manyhands.report.findings import Findings


def load(path: str | Path) -> RunRecord | StudyResults:
    """Read the record of a run, or the results of a study, from a folder; no code is executed (law 9)."""
    path = Path(path)
    folder = RunFolder(path)
    if not folder.exists() and _holds_runs(path):
        return StudyResults(StudyFolder(path).read())
    folder.spec()
    record = folder.record()
    if record is None:
        raise UsageError(f"{path} has no result yet; continue it with: manyhands train --resume {path}")
    return record


def _holds_runs(path: Path) -> bool:
    study = StudyFolder(path)
    return study.journal.is_file() or (
        path.is_dir() and any(RunFolder(inside).exists() for inside in path.iterdir())
    )


def report(folder: str | Path, *, out: str | Path | None = None, pictures: bool = True) -> Path:
    """Draw the report of a study, of a run or of a folder of runs, and return the path of its page."""
    from manyhands.report.page import draw
    from manyhands.report.sources import read

    return draw(read(Path(folder)), Path(out) if out is not None else None, pictures=pictures)


def chart_of(folder: Path, name: str | None = None) -> alt.ConcatChart:
    """A chart of one run; by default its learning curve, or the first that can be drawn."""
    from manyhands.report.sources import read

    study = StudyResults(read(folder))
    if name is None:
        if not study.charts:
            raise UsageError(f"{folder} has no numbers for a chart")
        name = "curves" if "curves" in study.charts else study.charts[0]
    return study.chart(name)


class StudyResults:
    """The results of a study: `records`, `frame()`, `chart(name)`, `answers`, `report()`."""

    def __init__(self, results: Results) -> None:
        self.results = results

    @property
    def records(self) -> list[RunRecord]:
        """One record per run."""
        return self.results.records

    @cached_property
    def findings(self) -> Findings:
        """The analyses of the study, computed on first use."""
        from manyhands.report.findings import Findings

        return Findings(self.results)

    @cached_property
    def _figures(self) -> dict[str, tuple[str, Figure]]:
        from manyhands.report.charts import CHARTS

        drawn = ((chart, chart.figure(self.findings)) for chart in CHARTS)
        return {chart.name: (chart.heading, figure) for chart, figure in drawn if figure is not None}

    @property
    def charts(self) -> list[str]:
        """The names of the charts that can be drawn from this study."""
        return list(self._figures)

    @property
    def answers(self) -> list[str]:
        """What to train with, one text per task."""
        return [answer.text for answer in self.findings.answers]

    def frame(self) -> pd.DataFrame:
        """Return a pandas data frame with one row per run."""
        try:
            import pandas as pd
        except ImportError:
            raise UsageError("a data frame needs pandas: pip install 'manyhands[notebook]'") from None
        return pd.DataFrame(self.findings.rows)

    def chart(self, name: str) -> alt.ConcatChart:
        """Return a chart by name; a notebook displays it."""
        from manyhands.report.charts import CHARTS
        from manyhands.report.figure import altair_chart

        if name not in self._figures:
            if name in {chart.name for chart in CHARTS}:
                raise UsageError(f"{self.results.name} has no numbers for the chart {name!r} ({self._known})")
            raise unknown("chart", name, self.charts)
        heading, figure = self._figures[name]
        return altair_chart(figure, heading)

    @property
    def _known(self) -> str:
        return f"it has: {', '.join(self.charts) or 'none'}"

    def report(self, out: Path | str | None = None) -> Path:
        """Write the report again and return the path of its page."""
        from manyhands.report.page import draw

        return draw(self.results, Path(out) if out is not None else None)

    def __repr__(self) -> str:
        return f"StudyResults({self.results.name!r}, {formatting.plural(len(self.records), 'run')})"

    def _repr_html_(self) -> str:
        """The answers, the best result of each strategy, and the names of the charts."""
        answers = "".join(
            f"<p style='font-size:1.1em;margin:.3em 0'>{escape(text)}</p>" for text in self.answers
        )
        sides = [
            formatting.plural(len(self.records), "run"),
            *(
                f"{len(cells)} {name}"
                for name in ("failed", "excluded", "left")
                if (cells := getattr(self.results, name))
            ),
        ]
        lines = []
        if "answer" in self._figures:
            for panel in self._figures["answer"][1].panels:
                pairs = ((escape(str(row["title"])), escape(str(row["shown"]))) for row in panel.data["rows"])
                best = "".join(
                    f"<tr><td style='text-align:left'>{title}</td><td>{shown}</td></tr>"
                    for title, shown in pairs
                )
                lines.append(
                    f"<tr><th colspan='2' style='text-align:left'>{escape(panel.title)}</th></tr>{best}"
                )
        table = f"<table>{''.join(lines)}</table>" if lines else ""
        charts = f"<p style='opacity:.75'>charts: {escape(', '.join(self.charts))}</p>"
        head = f"<p><b>{escape(self.results.title)}</b> · {escape(' · '.join(sides))}</p>"
        return f"<div>{head}{answers}{table}{charts}</div>"
