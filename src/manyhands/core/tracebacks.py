"""Where an error comes from: the deepest line of the user's own code, and a log of the traceback."""

from __future__ import annotations

import datetime
import os
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

_INSTALLED = ("site-packages", "dist-packages")
_NOT_USER_CODE = tuple(
    str(Path(folder)) + os.sep
    for folder in (Path(__file__).parents[1], sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
)
LOG_NOTE = "the whole traceback is in "


def users_line(trace: TracebackType | None) -> str:
    """`task.py:6 in forward`, or an empty text if the error passed through no line of the user.

    Most errors of a model are raised inside torch, but the line that called it is to be fixed.
    """
    location = ""
    for frame, line in traceback.walk_tb(trace):
        code = frame.f_code
        if is_the_users(code.co_filename):
            location = f"{_short(code.co_filename)}:{line} in {code.co_name}"
    return location


def headline(location: str, error: BaseException | str, text: str = "") -> str:
    """`task.py:6 in forward: RuntimeError: mat1 and mat2 ...`: the location, then the first line."""
    name = error if isinstance(error, str) else type(error).__name__
    lines = (text or ("" if isinstance(error, str) else str(error))).strip().splitlines()
    return ": ".join([location, name, *lines[:1]])


def keep(error: BaseException, log: Path, title: str) -> None:
    """Append the traceback to a log file, and add a note to the error that says where it is."""
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    whole = "".join(traceback.format_exception(error))
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"--- {now} {title}, pid {os.getpid()}\n{whole}")
    except OSError:
        return  # a full disk: the command line writes the log elsewhere
    error.add_note(f"{LOG_NOTE}{log}")


def is_the_users(filename: str) -> bool:
    """Whether a file is neither ours, nor Python's, nor of an installed package."""
    if filename.startswith("<"):  # generated at run time
        return False
    path = Path(filename).absolute()
    installed = any(part in _INSTALLED for part in path.parts)
    return not installed and not str(path).startswith(_NOT_USER_CODE)


def _short(filename: str) -> str:
    """Relative to the current folder, if it is inside it."""
    try:
        return str(Path(filename).resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return filename
