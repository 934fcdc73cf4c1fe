"""Colors of eleven variants that can be told apart, on white and on black."""

from __future__ import annotations

import itertools
import math
import re
from importlib import resources

import pytest

from manyhands.report import palette

LEAST = 20.0  # distance in CIELAB; 2.3 is just noticeable
CSS = resources.files("manyhands.report").joinpath("style.css").read_text("utf-8")


def variables(selector: str) -> dict[str, str]:
    """The custom properties of a rule of the style sheet."""
    body = CSS[CSS.index(selector + " {") :].partition("}")[0]
    return dict(re.findall(r"(--\w+): (#[0-9a-f]{6})", body))


def lab(color: str) -> tuple[float, float, float]:
    parts = [int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047
    y = 0.2126 * r + 0.7152 * g + 0.0722 * b
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883
    x, y, z = (each ** (1 / 3) if each > 0.008856 else 7.787 * each + 16 / 116 for each in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("selector", [":root", ':root[data-theme="dark"]'], ids=["light", "dark"])
def test_ten_strategies_and_the_baseline_have_colors_of_their_own(selector: str) -> None:
    looks = palette.looks(["single", *(f"way {k}" for k in range(10))])
    known = variables(selector)
    colors = {name: known[palette.VARIABLES[look.color][4:-1]] for name, look in looks.items()}
    assert len(set(colors.values())) == 11
    paper = known["--paper"]
    for one, other in itertools.combinations([*colors.values(), paper], 2):
        assert math.dist(lab(one), lab(other)) > LEAST, (one, other)


def test_the_page_and_the_pictures_have_the_same_colors() -> None:
    light = variables(":root")
    for color, variable in palette.VARIABLES.items():
        assert light[variable[4:-1]] == color
