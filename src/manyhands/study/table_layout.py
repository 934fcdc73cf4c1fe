"""How a study's table fits a terminal: which columns and texts give way first, and what always stays.

Speed, speed-up, time to the target and verdict stay, and no two rows may come to look alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

VERDICT = 20  # characters that a verdict needs to be understood
STRATEGY = 12  # characters of a strategy with its options, where room is scarce
_LEFT = ("strategy", "recipe", "verdict")  # columns of words; numbers are aligned to the right
_CELL = ("strategy", "workers", "threads", "batch", "recipe", "epochs")  # what tells rows apart
_IF_DIFFERENT = ("threads", "recipe", "epochs")  # shown only if rows differ in them
_BRIEF = {"not reached": "no"}  # to 97 %: no
_INTERVAL = re.compile(r" \(± [^)]*\)")


class Row(NamedTuple):
    """One row of a task's block, as text."""

    strategy: str
    workers: str
    threads: str
    batch: str
    recipe: str
    epochs: str
    rate: str
    speed_up: str
    to_target: str
    at_the_end: str
    verdict: str


class TaskTable(NamedTuple):
    """The rows of one task."""

    task: str
    header: Row
    rows: list[Row]
    baseline: str = ""  # what the speed-ups are relative to


Lines = list[Row]  # the header and the rows


def draw(block: TaskTable, width: int | None = None, footnote: bool = True) -> list[str]:
    """Return aligned columns that fit the width, without those that say nothing."""
    lines = [block.header, *block.rows]
    names = _informative(lines)
    for lines, names in _narrower(lines, names):  # noqa: B020 (each is narrower than the one before)
        if width is None or _width(lines, names) <= width:
            break
    drawn = _aligned(lines, names)
    if footnote:
        drawn += [*_legend(block.rows, lines[1:]), *_footnote(block, any(map(_has_interval, lines)))]
    return [cut(line, width) for line in drawn]


def cut(text: str, width: int | None) -> str:
    """Cut a text to at most this many characters."""
    return text if width is None or len(text) <= width else text[: max(1, width - 1)] + "…"


def bracketed(rows: Sequence[tuple[Row, str]]) -> list[Row]:
    """Return the rows with a bracket around neighbors that have the same text; the text is in the middle.

    ```
    ┐                    ┐ not told apart
    ├ not told apart     ┘
    ┘
    ```
    """
    found: list[Row] = []
    for text, together in groupby(rows, key=lambda pair: pair[1]):
        group = [row for row, _ in together]
        if text and len(group) > 1:
            marks = ["┐", *["├"] * (len(group) - 2), "┘"]
            middle = (len(group) - 1) // 2
            said = [text if number == middle else "" for number in range(len(group))]
            group = [
                row._replace(verdict=f"{mark} {', '.join(filter(None, [word, row.verdict]))}".rstrip())
                for row, mark, word in zip(group, marks, said, strict=True)
            ]
        found += group
    return found


def _legend(rows: Sequence[Row], shown: Sequence[Row]) -> list[str]:
    """The recipes that are shown as numbers."""
    recipes = {row.recipe: short.recipe for row, short in zip(rows, shown, strict=True)}
    return [f" recipe {short}: {recipe}" for recipe, short in recipes.items() if recipe != short]


def _footnote(block: TaskTable, intervals: bool) -> list[str]:
    if not any(row.speed_up for row in block.rows):
        return []
    left_out = not intervals and any(map(_has_interval, block.rows))
    notes = [
        f"speed-up: over {block.baseline}",
        *(["±: 95 % interval"] if intervals else []),
        *(["95 % intervals: see the report"] if left_out else []),
    ]
    return [" " + " · ".join(notes)]


def _informative(lines: Lines) -> list[str]:
    """The columns that are not empty; some only if they differ between rows."""
    found = []
    for name in Row._fields:
        values = set(_column(lines, name)[1:]) - {""}
        if values and not (name in _IF_DIFFERENT and len(values) == 1):
            found.append(name)
    return found


def _narrower(lines: Lines, names: list[str]) -> Iterator[tuple[Lines, list[str]]]:
    """Layouts from the widest to the narrowest."""
    yield lines, names
    for name in ("at_the_end", "epochs", "recipe", "threads"):
        fewer = [each for each in names if each != name]
        if name in names and not (name in _CELL and _alike(lines, fewer)):
            names = fewer
            yield lines, names
    steps: list[Callable[[Lines], Lines]] = [
        lambda lines: _changed(lines, "recipe", _numbered) if "recipe" in names else lines,
        lambda lines: _changed(lines, "strategy", _without_options),
        lambda lines: _changed(lines, "rate", _without_intervals),
        lambda lines: _changed(lines, "to_target", _without_intervals),
        lambda lines: _changed(lines, "strategy", lambda texts: shortened(texts, STRATEGY)),
        lambda lines: _changed(lines, "to_target", lambda texts: [_BRIEF.get(text, text) for text in texts]),
        lambda lines: _changed(
            lines, "workers", lambda texts: [text.replace("threads", "thr.") for text in texts]
        ),
        lambda lines: _changed(lines, "speed_up", _without_intervals),
    ]
    for step in steps:
        lines = step(lines)
        yield lines, names


def _width(lines: Lines, names: list[str]) -> int:
    """The width with verdicts cut to what is needed."""
    widths = {name: max(map(len, _column(lines, name))) for name in names}
    if "verdict" in widths:
        widths["verdict"] = min(VERDICT, widths["verdict"])
    return 1 + sum(widths.values()) + 2 * (len(widths) - 1)


def _aligned(lines: Lines, names: list[str]) -> list[str]:
    texts = []
    for name in names:
        column = _column(lines, name)
        longest = max(map(len, column))
        texts.append([text.ljust(longest) if name in _LEFT else text.rjust(longest) for text in column])
    return [" " + "  ".join(row).rstrip() for row in zip(*texts, strict=True)]


def _column(lines: Lines, name: str) -> list[str]:
    return [getattr(line, name) for line in lines]


def _changed(lines: Lines, name: str, change: Callable[[list[str]], list[str]]) -> Lines:
    header, *rows = lines
    texts = change(_column(rows, name))
    return [header, *(row._replace(**{name: text}) for row, text in zip(rows, texts, strict=True))]


def _alike(lines: Lines, names: list[str]) -> bool:
    """Whether two rows that differ would look the same with these columns."""
    rows = lines[1:]
    return len({_cell(row, names) for row in rows}) < len({_cell(row, _CELL) for row in rows})


def _cell(row: Row, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(getattr(row, name) for name in _CELL if name in names)


def _numbered(texts: list[str]) -> list[str]:
    """Numbers in order of appearance, in place of long texts."""
    numbers = {text: str(number) for number, text in enumerate(dict.fromkeys(filter(None, texts)), 1)}
    return [numbers.get(text, "") for text in texts]


def _without_options(texts: list[str]) -> list[str]:
    """Strategies without their options, where the table has the strategy with one set of options only."""
    variants: dict[str, set[str]] = {}
    for text in texts:
        variants.setdefault(text.partition(" ")[0], set()).add(text)
    first = [text.partition(" ")[0] for text in texts]
    return [name if len(variants[name]) == 1 else text for name, text in zip(first, texts, strict=True)]


def shortened(texts: Sequence[str], width: int) -> list[str]:
    """Texts of at most this width if possible: what differs stays different.

    The end of a text is left out, or else its middle, because options differ at the end: `pipel…ches=4`.
    """
    distinct = list(dict.fromkeys(texts))
    half = (width - 1) // 2
    ways: tuple[Callable[[str], str], ...] = (
        lambda text: text[: width - 1] + "…",
        lambda text: text[:half] + "…" + text[half + 1 - width :],
    )
    for way in ways:
        short = {text: text if len(text) <= width else way(text) for text in distinct}
        if len(set(short.values())) == len(distinct):
            return [short[text] for text in texts]
    return list(texts)


def _without_intervals(texts: list[str]) -> list[str]:
    return [_INTERVAL.sub("", text) for text in texts]


def _has_interval(row: Row) -> bool:
    return any(_INTERVAL.search(text) for text in row)
