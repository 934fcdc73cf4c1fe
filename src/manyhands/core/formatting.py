"""How numbers and texts are written for people, the same everywhere."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence

from manyhands.core.errors import shown

YEAR = 365.25 * 24 * 3600  # seconds


def count(number: float, unit: str = "") -> str:
    """`60,000 images`."""
    return f"{number:,.0f} {unit}".strip()


def plural(number: float, unit: str, units: str | None = None) -> str:
    """`1 worker`, `2 workers`, `0.5 epochs`. `units` is the plural if it is not `unit` + s."""
    whole = float(number).is_integer() or number >= 1e6  # `g` would drop digits of such a number
    text = f"{number:,.0f}" if whole else f"{number:,g}"
    return f"{text} {unit}" if number == 1 else f"{text} {units or unit + 's'}"


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def first_few(names: Sequence[str], most: int = 5) -> str:
    """The first of many names: `a, b, c and 7 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def percent(share: float, digits: int = 0) -> str:
    """`61 %`."""
    return f"{100 * share:.{digits}f} %"


def score(value: float | None, name: str) -> str:
    """A metric's value: accuracy in percent, others with four digits."""
    if value is None:
        return "-"
    return percent(value, 2) if name == "accuracy" else f"{value:.4g}"


def threshold(value: float, name: str) -> str:
    """A metric's target, with only the digits that were given: `98.5 %`."""
    return f"{round(100 * value, 6):g} %" if name == "accuracy" else f"{value:g}"


def duration(seconds: float) -> str:
    """`57 s`, `3 min 20 s`, `2 h 5 min`; below ten seconds with one decimal, below a tenth in `ms`."""
    if not math.isfinite(seconds):
        return "-"
    if seconds >= YEAR:
        return f"{seconds / YEAR:,.3g} years"
    if 0 < seconds < 0.0995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    minutes = whole // 60
    return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"


def size(number: float) -> str:
    """Bytes in powers of 1000: `57 MB`."""
    if not math.isfinite(number):
        return "-"
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def rate(number: float, unit: str = "samples") -> str:
    """`1,730 images/s`."""
    return f"{number:,.0f} {unit}/s" if number >= 10 else f"{number:.2g} {unit}/s"


def where_the_time_went(phases: dict[str, float]) -> str:
    """`backward 61 %, forward 31 %, ...`: the phases by size, without those below half a percent."""
    total = sum(phases.values()) or 1.0
    parts = sorted(((value / total, name) for name, value in phases.items()), reverse=True)
    return ", ".join(f"{name} {percent(share)}" for share, name in parts if share >= 0.005)


# characters that move the cursor of a terminal, ring its bell or change its direction, and surrogates
_CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
NO_BREAK = "\u00a0"
_WITH_UNIT = re.compile(r"(\d) (%|ms|s|min|h|[kMG]B)(?!\w)")
_IN_LINES, _IN_LINE = re.compile(f"[{_CONTROL}]"), re.compile(rf"[\t\n{_CONTROL}]")


def printed(text: str) -> str:
    """Text for a terminal, with control characters escaped: a file may contain them in any name."""
    return _IN_LINES.sub(_escaped, text)


def line(text: str) -> str:
    """The same on one line: line breaks and tabs are escaped too."""
    return _IN_LINE.sub(_escaped, text)


def wrapped(text: str, width: int, first: str = "", then: str = "") -> str:
    """A paragraph in lines of this width, for a terminal; `first` and `then` indent them."""
    filled = textwrap.fill(together(line(text)), width, initial_indent=first, subsequent_indent=then)
    return filled.replace(NO_BREAK, " ")


def together(text: str) -> str:
    """The same with no line break between a number and its unit."""
    return _WITH_UNIT.sub(rf"\1{NO_BREAK}\2", text)


def json_printed(text: str) -> str:
    """JSON for a terminal, with control characters escaped as JSON does, so that its meaning stays."""
    return _IN_LINES.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _escaped(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def nbytes(text: str) -> int:
    """The number of bytes in a text such as `2GB`, `500 MB`, `1.5GiB` or `4096`."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"must be a size such as 2GB, 500MB or 1.5GiB, got {shown(text)}")
    number, unit, binary = found.groups()
    size = float(number) * float(1024 if binary else 1000) ** _POWERS[unit.upper()]
    if not math.isfinite(size):
        raise ValueError(f"must be a size that a machine can have, got {shown(text)}")
    return int(size)
