"""Draws the latencies of a run as an SVG: which share of the values is at most so long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor, log10

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 48, 16, 16, 40
COLOURS = ("#1f6feb", "#d1661f", "#2e8b57", "#8250df")
MOST_POINTS = 200


def draw(curves: Mapping[str, Sequence[float]]) -> str:
    """Return the SVG of cumulative shares, by name, of values in milliseconds on a logarithmic axis."""
    shown = {name: sorted(value for value in values if value > 0) for name, values in curves.items()}
    shown = {name: values for name, values in shown.items() if values}
    low = floor(log10(min((values[0] for values in shown.values()), default=1.0)))
    high = max(low + 1, ceil(log10(max((values[-1] for values in shown.values()), default=10.0))))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]

    def x(value: float) -> float:
        return LEFT + (log10(value) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.append(f'<path d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{10.0**power:g}</text>')
    for percent in (0, 50, 90, 100):
        at = y(percent / 100)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{percent} %</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">milliseconds</text>')
    for number, (name, values) in enumerate(shown.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = sorted({round(n * (len(values) - 1) / MOST_POINTS) for n in range(MOST_POINTS + 1)})
        line = " ".join(f"{x(values[place]):.1f},{y((place + 1) / len(values)):.1f}" for place in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + 8}" y="{TOP + 14 + 16 * number}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])
