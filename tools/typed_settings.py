"""Write the settings of `mh.train` as a TypedDict, from RunSpec and the options of every strategy.

    python tools/typed_settings.py > src/manyhands/runs/settings.py

Editors complete and check what they can read; a test compares the file with what this prints.
"""

from __future__ import annotations

from typing import Any

from manyhands.cli.flags import SETTINGS
from manyhands.core import registry
from manyhands.core.registry.strategies import STRATEGIES
from manyhands.records.spec import RunSpec

# what `train` accepts besides
WIDER = {
    "workers": 'int | Literal["auto"]',
    "memory": "int | str | None",
    "recipe": "str | Callable[..., Any]",
    "lr_schedule": "str | Callable[[int], float]",
}
HEAD = '''"""The settings of `mh.train` and `mh.verify`, for editors. Written by tools/typed_settings.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypedDict


class Settings(TypedDict, total=False):
    """Every field of RunSpec but the task, and every option of a strategy by its name."""
'''


def text() -> str:
    """The content of the file."""
    lines = [HEAD]
    for name, field in RunSpec.model_fields.items():
        if name != "task":
            lines.append(_line(name, field.annotation, SETTINGS[name].help))
    seen: dict[str, tuple[registry.Option, list[str]]] = {}
    for strategy, row in STRATEGIES.items():
        for option in registry.options(row.options).values():
            if option.name not in RunSpec.model_fields:
                seen.setdefault(option.name, (option, []))[1].append(strategy)
    for name, (option, strategies) in seen.items():
        lines.append(_line(name, option.type, f"{' and '.join(strategies)}: {option.description}"))
    return "\n".join(lines) + "\n"


def _line(name: str, kind: Any, about: str) -> str:
    shown = WIDER.get(name) or (
        kind.__name__ if isinstance(kind, type) and "[" not in str(kind) else str(kind)
    )
    shown = shown.replace("typing.", "").replace("'", '"')
    if "None" not in shown:
        shown += " | None"
    comment = about.split(". ")[0].rstrip(".")
    line = f"    {name}: {shown}"
    return line if len(line) + len(comment) > 106 else f"{line}  # {comment}"


if __name__ == "__main__":
    print(text(), end="")
