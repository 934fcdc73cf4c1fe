"""Put the answers of repeated runs of one study side by side: do they agree within their own intervals?

python benchmarks/trust/side_by_side.py results/first results/second results/third

Prints a Markdown table per task: what each study advises, its winners, and every cell's speed-up. Two studies
agree on a cell if their intervals overlap.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from manyhands.analysis import groups
from manyhands.analysis.answer import Answer, answers
from manyhands.analysis.scaling import Point, points
from manyhands.analysis.target import ToTarget
from manyhands.core.statistics import Summary
from manyhands.records.study_results import Results, StudyFolder


def name(cell: ToTarget | Point) -> str:
    """`allreduce, 2 workers, batch 256`."""
    return f"{cell.variant}, {cell.workers_text}, batch {cell.batch}"


def between(found: Summary | None) -> str:
    """`1.63x (1.55 to 1.71)`."""
    return f"{found.median:.2f}x ({found.low:.2f} to {found.high:.2f})" if found else "-"


def agree(found: list[Summary | None]) -> bool:
    """Whether any two of the intervals overlap."""
    known = [each for each in found if each]
    return not known or max(each.low for each in known) <= min(each.high for each in known)


def speed_ups(results: Results, task: str) -> dict[str, Summary | None]:
    """The speed-up of every cell over one worker with one thread."""
    found = points(results.records, task, results.price, results.blocks)
    return {name(point): point.speed_up for point in found}


def answer_of(results: Results, task: str) -> Answer:
    return next(each for each in answers(results) if each.task == task)


def table(studies: list[Results], task: str) -> list[str]:
    """The lines of one task's table."""
    told = [answer_of(study, task) for study in studies]
    advised = [name(each.advised) if each.advised else "nothing" for each in told]
    winners = ["; ".join(sorted(map(name, each.winners))) for each in told]
    found = [speed_ups(study, task) for study in studies]
    rows = [["advised", *advised, "yes" if len(set(advised)) == 1 else "no"], ["winners", *winners, ""]]
    for cell in dict.fromkeys(cell for each in found for cell in each):
        values = [each.get(cell) for each in found]
        rows.append([cell, *map(between, values), "yes" if agree(values) else "no"])
    heads = [task, *(study.folder.name for study in studies), "agree"]
    return [f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *rows]]


def main() -> None:
    """Print one table per task."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", type=Path, nargs="+", help="folders of the same study")
    studies = [StudyFolder(path).read() for path in parser.parse_args().studies]
    for task in groups.tasks(studies[0].records):
        print("\n".join([*table(studies, task), ""]))


if __name__ == "__main__":
    main()
