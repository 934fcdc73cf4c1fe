"""`manyhands doctor`: what is installed, what is missing, and what to do about it."""

from __future__ import annotations

import json as json_format
from typing import Annotated

import typer

EXAMPLES = """Examples:

manyhands doctor

manyhands doctor --json"""


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
) -> None:
    """Check this machine: versions, cores, threads, memory, extras and data."""
    from manyhands.runs.doctor import doctor as diagnose

    found = diagnose()
    print(json_format.dumps([each._asdict() for each in found], indent=2) if json else repr(found))
