"""Charts as PNG and SVG files, for papers and slides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import vl_convert

from manyhands.core.atomic_files import write_atomically
from manyhands.core.errors import ManyhandsError
from manyhands.report.figure import Figure, arranged


def write(folder: Path, name: str, heading: str, figure: Figure) -> None:
    """Write `NAME.svg`, and `NAME.png` at 1.6 times its size."""
    drawn = svg(name, heading, figure)
    write_atomically(folder / f"{name}.svg", drawn)
    write_atomically(folder / f"{name}.png", vl_convert.svg_to_png(drawn.decode(), scale=1.6))


def svg(name: str, heading: str, figure: Figure) -> bytes:
    """The chart as an SVG file."""
    chart, data = arranged(figure, heading)
    spec = _without_tooltips(chart.to_dict(validate=False)) | {"datasets": data}
    try:
        return vl_convert.vegalite_to_svg(spec).encode()
    except ValueError as error:
        raise ManyhandsError(f"chart {name} could not be drawn: {str(error).splitlines()[0]}") from None


def _without_tooltips(node: Any) -> Any:
    """Remove tooltips and the invisible marks that carry them: a picture has no pointer."""
    if isinstance(node, list):
        return [_without_tooltips(each) for each in node]
    if not isinstance(node, dict):
        return node
    node = {name: _without_tooltips(value) for name, value in node.items() if name != "tooltip"}
    if "layer" in node:
        node["layer"] = [each for each in node["layer"] if not _invisible(each.get("mark"))]
    return node


def _invisible(mark: Any) -> bool:
    return isinstance(mark, dict) and mark.get("opacity") == 0
