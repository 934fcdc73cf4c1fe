"""Study files: TOML in, the list of cells (run specs) out."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from manyhands.arrange import arrange
from manyhands.errors import UsageError, choices
from manyhands.run import check
from manyhands.spec import RunSpec

_KEYS = ("name", "fallback", "grid")


class Study(NamedTuple):
    """A name, the cells in their order, and the task to take where a cell's data cannot be had."""

    name: str
    cells: list[RunSpec]
    fallback: str | None


def read(path: Path) -> Study:
    """Read a study file; every cell is checked before any of them runs."""
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read the study {path}: {(error.strerror or str(error)).lower()}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    for key in content:
        if key not in _KEYS:
            raise UsageError(f"{path} has no key {key!r} ({choices(key, _KEYS)})")
    cells = [cell for table in content.get("grid", []) for cell in expand(table)]
    if not cells:
        raise UsageError(f"{path} has no cells: it needs at least one [[grid]]")
    for cell in cells:
        check(cell)
    return Study(content.get("name", path.stem), cells, content.get("fallback"))


def expand(table: dict[str, Any]) -> list[RunSpec]:
    """One table of RunSpec's fields; where a field is a list, a cell for each of its values."""
    lists = {key: value if isinstance(value, list) else [value] for key, value in table.items()}
    combinations = itertools.product(*lists.values())
    return [RunSpec.of(**arrange(dict(zip(lists, values, strict=True)))) for values in combinations]
