"""A bar chart as SVG, drawn by hand: a picture for a page, without a library."""

from __future__ import annotations

from html import escape

WIDTH, LEFT, RIGHT, ROW, TOP = 720, 170, 70, 34, 64
INK, BAR, LINE = "#6b7280", "#2563eb", "#d97706"  # readable on white and on black, by the color-blind too


def bars(title: str, axis: str, values: list[tuple[str, float]], ideal: float) -> str:
    """Horizontal bars, and a line where the ideal is."""
    height = TOP + ROW * len(values) + 40
    scale = (WIDTH - LEFT - RIGHT) / max([ideal, *(value for _, value in values)])
    line = LEFT + ideal * scale
    text = f'font-family="system-ui, sans-serif" font-size="14" fill="{INK}"'
    words = ", ".join(f"{name} {value:.2f}" for name, value in values)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}: {escape(words)}; ideal {ideal:.2f}">',
        f'<text x="{LEFT}" y="22" {text} font-weight="600">{escape(title)}</text>',
        f'<text x="{line:.0f}" y="{TOP - 14}" {text} text-anchor="middle">ideal {ideal:.2f}</text>',
    ]
    for number, (name, value) in enumerate(values):
        y = TOP + ROW * number
        parts += [
            f'<text x="{LEFT - 10}" y="{y + 20}" {text} text-anchor="end">{escape(name)}</text>',
            f'<rect x="{LEFT}" y="{y + 4}" width="{value * scale:.1f}" height="{ROW - 12}" rx="3" '
            f'fill="{BAR}"/>',
            _label(value, LEFT + value * scale, y + 20, line, text),
        ]
    bottom = TOP + ROW * len(values)
    parts += [
        f'<line x1="{line:.1f}" x2="{line:.1f}" y1="{TOP - 6}" y2="{bottom}" stroke="{LINE}" '
        'stroke-width="2" stroke-dasharray="5 4"/>',
        f'<text x="{LEFT}" y="{bottom + 24}" {text}>{escape(axis)}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _label(value: float, end: float, y: int, line: float, text: str) -> str:
    """Behind the bar, or inside its end where the line of the ideal would cross the number."""
    if end - 4 < line < end + 44:
        inside = text.replace(INK, "#ffffff")
        return f'<text x="{end - 8:.1f}" y="{y}" {inside} text-anchor="end">{value:.2f}</text>'
    return f'<text x="{end + 8:.1f}" y="{y}" {text}>{value:.2f}</text>'
