"""Find the line of a key in a TOML file: tomllib does not keep line numbers, and errors name them."""

from __future__ import annotations

import re
from collections import Counter

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*$")
_KEY = re.compile(r"\s*((?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=")
# a string on one line, a comment, or the beginning of a multi-line string
_TEXT = re.compile(r"\"\"\"|'''|\"(?:[^\"\\]|\\.)*\"|'[^']*'|#.*")


class TomlLines:
    """The line of every table and of every key in it."""

    def __init__(self, text: str) -> None:
        self._found: dict[tuple[str, int, str], int] = {}
        self._tables: Counter[str] = Counter()
        self._scan(text)

    def of(self, table: str, index: int = 0, key: str = "") -> int | None:
        """The line of a dotted key in the index-th table of this name ("" is the top), or of its parent."""
        parts = key.split(".")
        for length in range(len(parts), 0, -1):
            line = self._found.get((table, index, ".".join(parts[:length])))
            if line is not None:
                return line
        return None

    def _scan(self, text: str) -> None:
        table, prefix, depth, quote = "", "", 0, ""
        for number, raw in enumerate(text.split("\n"), 1):
            line, began_inside, quote = _code(raw, quote)
            if depth == 0 and not began_inside:
                if header := _HEADER.match(line):
                    table, prefix = self._enter(header[1], header[2], number)
                    continue
                if (key := _KEY.match(raw)) and "=" in line:
                    self._note(table, prefix + _plain(key[1]), number)
            depth = max(0, depth + _opened(line))

    def _enter(self, brackets: str, name: str, number: int) -> tuple[str, str]:
        """`[[grid]]` begins a table, `[grid.options]` continues the last one."""
        table, _, rest = _plain(name).partition(".")
        if brackets == "[[" and not rest:
            self._tables[table] += 1
        prefix = f"{rest}." if rest else ""
        self._note(table, rest, number)
        return table, prefix

    def _note(self, table: str, key: str, number: int) -> None:
        index = max(0, self._tables[table] - 1)
        parts = key.split(".") if key else [""]
        for length in range(1, len(parts) + 1):  # `a.b = 1` is also where `a` begins
            self._found.setdefault((table, index, ".".join(parts[:length])), number)


def _plain(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))


def _code(line: str, quote: str) -> tuple[str, bool, str]:
    """The line without strings and comments, whether it began inside a string, and the quote it ends in."""
    began_inside, at = bool(quote), 0
    kept: list[str] = []
    while True:
        if quote:
            end = line.find(quote, at)
            if end < 0:
                return "".join(kept), began_inside, quote
            at, quote = end + 3, ""
        found = _TEXT.search(line, at)
        if found is None:
            kept.append(line[at:])
            return "".join(kept), began_inside, ""
        kept.append(line[at : found.start()])
        if found[0] in ('"""', "'''"):
            quote = found[0]
        at = found.end()


def _opened(line: str) -> int:
    return sum(line.count(bracket) for bracket in "[{") - sum(line.count(bracket) for bracket in "]}")
