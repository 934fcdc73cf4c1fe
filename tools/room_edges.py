"""Print which rooms of a package import which, how often, and whether any of them form a cycle.

python tools/room_edges.py              # this tree
python tools/room_edges.py --tree DIR   # another one, to compare before and after
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = "manyhands"
ROOT = "(root)"  # modules beside the rooms: one room, as a reader of the folder sees it
Edges = Counter[tuple[str, str]]


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Every imported (module, name) of this package; imports for type checkers only count like the others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == PACKAGE:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == PACKAGE)


def room_of(parts: tuple[str, ...], rooms: set[str]) -> str:
    """The room of a module: the first part of its path that is a folder."""
    return parts[0] if parts and parts[0] in rooms else ROOT


def edges(source: Path) -> Edges:
    """How many modules of one room import from another."""
    rooms = {path.name for path in source.iterdir() if (path / "__init__.py").exists()}
    found: Edges = Counter()
    for path in sorted(source.rglob("*.py")):
        here = room_of(path.relative_to(source).parts, rooms)
        reached = set()
        for module, name in imports(ast.parse(path.read_text())):
            parts = (*module.split(".")[1:], *([name] if module == PACKAGE else []))
            reached.add(room_of(parts, rooms))
        found.update((here, there) for there in reached - {here})
    return found


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of rooms that reach each other."""

    def reachable(room: str) -> set[str]:
        seen, todo = set[str](), [room]
        while todo:
            for following in graph.get(todo.pop(), set()) - seen:
                seen.add(following)
                todo.append(following)
        return seen

    reach = {room: reachable(room) for room in graph}
    groups = {
        frozenset({a, *(b for b in reach[a] if a in reach.get(b, set()))}) for a in graph if a in reach[a]
    }
    return sorted(sorted(group) for group in groups)


def main() -> None:
    """Print the edges, the fan-out of each room and the cycles."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1], help="root of the project")
    found = edges(parser.parse_args().tree / "src" / PACKAGE)
    graph: dict[str, set[str]] = defaultdict(set)
    for a, b in found:
        graph[a].add(b)
    for room in sorted(graph):
        reached = ", ".join(f"{there} {found[room, there]}" for there in sorted(graph[room]))
        print(f"{room} -> {reached}")
    rooms = sorted(graph, key=lambda room: -len(graph[room]))
    print(f"\n{len(found)} edges between {len({*graph, *(b for _, b in found)})} rooms")
    print("largest fan-out: " + ", ".join(f"{room} {len(graph[room])}" for room in rooms[:5]))
    knots = cycles(graph)
    print("cycles: " + ("; ".join(" <-> ".join(knot) for knot in knots) or "none"))


if __name__ == "__main__":
    main()
