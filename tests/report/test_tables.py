"""The table of all runs: what is the same is said once, times keep their digits."""

from __future__ import annotations

import re
from pathlib import Path

from manyhands.records.study_results import Results
from manyhands.report import tables
from manyhands.report.findings import Findings
from manyhands.testing.records import record


def table(*records: object) -> str:
    found = Findings(Results(Path("x"), "x", "x", records=list(records)))  # type: ignore[arg-type]
    return tables.runs(found, link=lambda run: run)


def heads(html: str) -> list[str]:
    return re.findall(r'<button type="button">(.*?)</button>', html)


def test_what_is_the_same_in_all_runs_is_said_once() -> None:
    alike = table(record(rate=10_000), record(rate=20_000, strategy="allreduce", workers=2))
    assert "The same in all runs: task mnist-mlp, threads 1, batch 128, " in alike
    assert not {"task", "threads", "batch", "seed"} & set(heads(alike))
    assert {"strategy", "workers", "samples/s"} <= set(heads(alike))
    mixed = table(record(batch=64), record(batch=128, threads=2))
    assert {"threads", "batch"} <= set(heads(mixed))


def test_milliseconds_keep_their_digits() -> None:
    """73 ms were shown as `0.1`."""
    fast = table(record(rate=700_000), record(rate=10_000, batch=64))
    cells = re.findall(r'<td class="n">([\d.,]+)</td>', fast)
    assert "0.0731" in cells, cells
    assert "2.56" in cells
