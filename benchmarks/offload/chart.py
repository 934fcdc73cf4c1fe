"""Memory against time as SVG, drawn by hand: a picture for a page, without a library."""

from __future__ import annotations

from html import escape
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 420, 70, 150, 60, 60
INK, OURS, THEIRS, LINE = "#6b7280", "#2563eb", "#d97706", "#9ca3af"  # readable on white and on black


class Point(NamedTuple):
    """One side."""

    name: str
    memory: float  # of plain
    time: float  # of plain
    ours: bool


def scatter(title: str, points: list[Point]) -> str:
    """One dot per side; the shaded corner is the goal: a fifth of the memory, a quarter more time."""
    most = max(1.3, *(point.time for point in points)) + 0.05
    fewest = min(0.95, *(point.time for point in points)) - 0.02

    def x(memory: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * memory / 1.1

    def y(time: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (time - fewest) / (most - fewest)

    text = f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}"'
    words = ", ".join(f"{p.name} {p.memory:.2f} of the memory at {p.time:.2f} of the time" for p in points)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}: {escape(words)}">',
        f'<text x="{LEFT}" y="24" {text} font-weight="600">{escape(title)}</text>',
        f'<rect x="{x(0):.0f}" y="{y(1.25):.0f}" width="{x(0.2) - x(0):.0f}" '
        f'height="{y(fewest) - y(1.25):.0f}" fill="{OURS}" opacity="0.12"/>',
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(fewest):.0f}" y2="{y(fewest):.0f}" stroke="{LINE}"/>',
        f'<line x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{y(fewest):.0f}" stroke="{LINE}"/>',
    ]
    below = HEIGHT - BOTTOM + 20
    parts += [
        f'<text x="{x(share):.0f}" y="{below}" {text} text-anchor="middle">{share:.1f}</text>'
        for share in (0.2, 0.4, 0.6, 0.8, 1.0)
    ]
    ticks = [tick / 20 for tick in range(int(fewest * 20) + 1, int(most * 20) + 1)]
    parts += [
        f'<text x="{LEFT - 8}" y="{y(time) + 4:.0f}" {text} text-anchor="end">{time:.2f}</text>'
        for time in ticks[:: max(1, len(ticks) // 7)]
    ]
    for point in points:
        color = OURS if point.ours else THEIRS
        parts += [
            f'<circle cx="{x(point.memory):.1f}" cy="{y(point.time):.1f}" r="6" fill="{color}"/>',
            f'<text x="{x(point.memory) + 10:.1f}" y="{y(point.time) - 6:.1f}" {text}>'
            f"{escape(point.name)}</text>",
        ]
    parts += [
        f'<text x="{LEFT}" y="{HEIGHT - 14}" {text}>activations at the peak, relative to plain; the goal is '
        "the shaded corner</text>",
        f'<text x="{LEFT - 56}" y="{TOP - 14}" {text}>time per step, relative to plain, kept</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
