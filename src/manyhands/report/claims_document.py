"""docs/claims.md, written from the records of the claims' studies: verdicts, parts, pictures, commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from manyhands.claims import CLAIMS, Claim, Finding, Part
from manyhands.core import formatting
from manyhands.core.atomic_files import write_atomically
from manyhands.core.errors import UsageError
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Results, StudyFolder
from manyhands.report import pictures
from manyhands.report.charts.claim_plots import figure

SHOWN = 40  # rows of a table of numbers, at most

_INTRODUCTION = """# Published claims, tested

`studies/` has a study for each of eight published claims; two of them share one. `manyhands claims run NAME`
runs it and decides the claim; `manyhands claims write` has written this page from the records. A pure
function of the records decides each claim (`src/manyhands/claims/`); it is tested with made-up records on
both sides of every threshold.

A claim has parts. Each is an estimate with its 95 % interval, a threshold, and a condition that the
experiment must meet to be able to refute it. A part *holds here* if the whole interval is on the claim's
side of the threshold. It *does not hold here* if the whole interval is on the other side and the condition
is met. Everything else is *not settled*, with the reason and with what would settle it. One part that does
not hold decides a claim; otherwise one that is not settled leaves it open. "Here" means on the machine that
is named: other machines and longer training may give other answers, which is why there is a command.
"""


class Judged(NamedTuple):
    """A claim, the results of its study if there are any, and what they say."""

    claim: Claim
    results: Results | None
    finding: Finding | None

    @property
    def verdict(self) -> str:
        """The verdict, or that there are no runs."""
        return self.finding.verdict if self.finding else "not run yet"


def judged(folder: Path) -> list[Judged]:
    """Every claim with what the studies below a folder found about it."""
    found = []
    for name, claim in CLAIMS.items():
        study = StudyFolder(folder / claim.tested_by)
        results = study.read() if study.journal.is_file() else None
        if results is not None and results.claim != claim.tested_by:
            raise UsageError(f"{study.path} is not the study of the claim {name}")
        known = results is not None and bool(results.records or results.blocks)
        found.append(Judged(claim, results, claim.judge(results) if results is not None and known else None))
    return found


def write(found: Sequence[Judged], path: Path) -> None:
    """Write the document and, in a folder of the same name beside it, the pictures."""
    drawn = {}
    for claim, _, finding in found:
        picture = figure(finding) if finding is not None else None
        if picture is not None:
            target = path.parent / path.stem / f"{claim.name}.svg"
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(target, pictures.svg(claim.name, "", picture))
            drawn[claim.name] = f"{path.stem}/{claim.name}.svg"
    write_atomically(path, document(found, drawn).encode())


def document(found: Sequence[Judged], drawn: Mapping[str, str]) -> str:
    """The document in Markdown; `drawn` has the path of each claim's picture."""
    rows = [
        f"| [{each.claim.name}](#{each.claim.name}) | {_cell(each.claim.statement)} | **{each.verdict}** | "
        f"{_runs(each)} | `manyhands claims run {each.claim.name}` |"
        for each in found
    ]
    head = ["| claim | statement | verdict | runs | command |", "|---|---|---|---|---|"]
    sections = [_section(each, drawn.get(each.claim.name)) for each in found]
    return "\n".join([_INTRODUCTION, _machine(found), "", *head, *rows, "", *sections])


def _machine(found: Sequence[Judged]) -> str:
    records = [record for each in found if each.results for record in each.results.records]
    return f"Measured {_where(records)}." if records else "No study has been run yet."


def _where(records: Sequence[RunRecord]) -> str:
    """`on 2026-11-17 on 2 cores of AMD EPYC, 25.3 GB, torch 2.13.0`."""
    days = sorted({record.environment.started[:10] for record in records})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    machines = dict.fromkeys(
        f"{formatting.plural(r.environment.cores, 'core')} of {r.environment.cpu}, "
        f"{formatting.size(r.environment.memory)}, torch {r.environment.torch}"
        for r in records
    )
    return f"on {when} on {'; and on '.join(machines)}"


def _runs(each: Judged) -> str:
    if each.results is None:
        return "-"
    results = each.results
    count = formatting.plural(len(results.records), "run")
    missing = len(results.left) + len(results.failed)
    return count + (f" ({missing} not done)" if missing else "")


def _section(each: Judged, picture: str | None) -> str:
    claim, results, finding = each
    lines = [f"## {claim.name}", "", f"> {claim.statement} ({claim.source})", ""]
    if finding is None or results is None:
        takes = f", about {claim.takes} on two cores" if claim.takes else ""
        return "\n".join([*lines, f"**Not run yet**: `manyhands claims run {claim.name}`{takes}.", ""])
    lines += [f"**{_upper(finding.verdict)}.**", ""]
    lines += [f"- {_upper(point)}." for point in finding.points]
    lines += [""]
    if finding.parts:
        lines += [*_table([_part_row(part) for part in finding.parts]), ""]
    if finding.beside:
        lines += [finding.beside, ""]
    if picture:
        lines += [f"![{claim.name}: found here, and published]({picture})", ""]
    lines += [f"- {note}" for note in claim.notes]
    lines += [f"- {_command(each)}", ""]
    if finding.table:
        lines += ["<details><summary>Numbers</summary>", ""]
        lines += [*_table(finding.table[:SHOWN]), "", "</details>", ""]
    return "\n".join(lines)


def _part_row(part: Part) -> dict[str, object]:
    side = "at least" if part.above else "at most"
    verdict = {True: "holds", False: "does not hold", None: f"not settled: {part.because}"}[part.holds]
    return {
        "part": part.name,
        "estimate": part.shown(part.found.value),
        "95 % interval": part.interval,
        "the claim says": f"{side} {part.shown(part.threshold)}",
        "verdict": verdict,
    }


def _command(each: Judged) -> str:
    assert each.results is not None
    results, claim = each.results, each.claim
    spent = sum(record.seconds for record in results.records)
    text = f"`manyhands claims run {claim.name}`: {formatting.plural(len(results.records), 'run')}, "
    text += f"{formatting.duration(spent)} of training in all"
    text += f", {_where(results.records)}" if results.records else ""
    missing = len(results.left) + len(results.failed)
    return text + (f"; {formatting.plural(missing, 'cell')} of the study not done." if missing else ".")


def _table(rows: Sequence[Mapping[str, object]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    lines += [f"| {' | '.join(_cell(str(row.get(name, ''))) for name in names)} |" for row in rows]
    return lines


def _cell(text: str) -> str:
    """Text in a cell of a table: a bar would end it."""
    return text.replace("|", "\\|").replace("\n", " ")


def _upper(text: str) -> str:
    """With a capital, unless it begins with the name of a task."""
    first = text.split(" ")[0]
    return text if "-" in first or first.endswith(":") else text[:1].upper() + text[1:]
