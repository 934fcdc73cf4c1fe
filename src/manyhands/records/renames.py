"""Names in files of earlier versions, and their current names, all in one table.

The table is applied to parsed JSON before it is checked against its schema, so all other code knows only
the current names. New files have current names; old files are not rewritten.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

File = Literal["record", "step", "checkpoint"]


class Rename(NamedTuple):
    """A name that has changed, and where it occurs.

    `path` leads from the top of the file to those objects; `*` stands for every element of a list. The name
    is a key of an object, or the first element of a list: a span of a timeline is `["forward", 0.0, 0.1]`.
    """

    path: tuple[str, ...]
    old: str
    new: str


RENAMES: dict[File, tuple[Rename, ...]] = {
    "record": (  # result.json
        Rename((), "pace", "step_times"),
        Rename(("step_times", "*", "phases"), "optimiser", "optimizer"),
        Rename(("phases", "*"), "optimiser", "optimizer"),
        Rename(("timeline", "*", "*"), "optimiser", "optimizer"),
    ),
    "step": (  # a line of steps.jsonl
        Rename(("phases",), "optimiser", "optimizer"),
    ),
    "checkpoint": (  # the plain state of a checkpoint, next to its tensors
        Rename(("clock",), "optimiser", "optimizer"),
    ),
}

_OLD_CELL_KEY = re.compile(r"-[0-9a-f]{8}(-\d+)?$")  # of version 0.1.0: eight digits of a spec's id


def update(file: File, fields: Any) -> bool:
    """Replace old names in the parsed JSON of a file, in place; return whether there were any."""
    found = False
    for path, old, new in RENAMES[file]:
        for each in _reached(fields, path):
            if isinstance(each, dict) and old in each:
                _rename_key(each, old, new)
                found = True
            elif isinstance(each, list) and each[:1] == [old]:
                each[0] = new
                found = True
    return found


def update_cell_keys(
    events: list[dict[str, Any]], keys_of: Callable[[dict[str, Any]], dict[str, str]]
) -> list[dict[str, Any]]:
    """Return the events of a study's journal with the current keys of cells.

    `keys_of` maps old keys to current ones for the cells of a `study` event. An old key belongs to the
    session that wrote it: in another session the same eight digits may mean another run.
    """
    if not any(_OLD_CELL_KEY.search(str(event.get("cell"))) for event in events):
        return events  # computing the key of every cell takes a while
    keys: dict[str, str] = {}
    updated = []
    for event in events:
        if event["event"] == "study":
            keys = keys_of(event)
        key = event.get("cell")
        updated.append({**event, "cell": keys[key]} if key in keys else event)
    return updated


def _reached(value: Any, path: Sequence[str]) -> Iterator[Any]:
    """The values at a path; a file may be damaged, so nothing is assumed about its structure."""
    if not path:
        yield value
        return
    first, rest = path[0], path[1:]
    if first == "*":
        inside = value if isinstance(value, list) else []
    else:
        inside = [value[first]] if isinstance(value, dict) and first in value else []
    for each in inside:
        yield from _reached(each, rest)


def _rename_key(fields: dict[str, Any], old: str, new: str) -> None:
    """Rename a key and keep the order of all keys; if both names exist, the current one counts."""
    items = [
        (new if key == old else key, value)
        for key, value in fields.items()
        if key != old or new not in fields
    ]
    fields.clear()
    fields.update(items)
