"""A scatter picture as SVG: predicted over measured step time on logarithmic axes.

Plain text, so that the same numbers give the same file on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

WIDTH, HEIGHT = 760, 470
LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT = 62, 18, 470, 400

LEAST_RATIO, MOST_RATIO = 0.25, 4.0
RATIOS = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0)

COLOURS = (
    "#1b6ca8", "#d1495b", "#2e933c", "#edae49", "#7b4fa3", "#00798c",
    "#8a5a44", "#e36397", "#5c6b73", "#9bc53d", "#30323d",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run."""

    group: str
    """Its colour and its line in the legend."""
    measured: float
    predicted: float


def scatter(points: Sequence[Point]) -> str:
    """The picture: measured step time to the right, predicted over measured upwards."""
    low = floor(log10(min(point.measured for point in points)))
    high = ceil(log10(max(point.measured for point in points)))
    groups = list(dict.fromkeys(point.group for point in points))
    most_first = sorted(groups, key=lambda name: -sum(p.group == name for p in points))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_axes(low, high),
        *(
            _dots(
                [p for p in points if p.group == name], COLOURS[groups.index(name) % 11], low, high
            )
            for name in most_first
        ),
        *_legend(groups, points),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _x(seconds: float, low: int, high: int) -> float:
    return LEFT + PLOT_WIDTH * (log10(seconds) - low) / (high - low)


def _y(ratio: float) -> float:
    bounded = min(MOST_RATIO, max(LEAST_RATIO, ratio))
    share = (log10(bounded) - log10(LEAST_RATIO)) / (log10(MOST_RATIO) - log10(LEAST_RATIO))
    return TOP + PLOT_HEIGHT * (1 - share)


def _axes(low: int, high: int) -> list[str]:
    right, bottom = LEFT + PLOT_WIDTH, TOP + PLOT_HEIGHT
    lines = []
    for ratio in RATIOS:
        y, strong = _y(ratio), ratio == 1.0
        colour = "#333" if strong else "#ddd"
        lines.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="{colour}"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{ratio:g}</text>')
    for power in range(low, high + 1):
        x = _x(10.0**power, low, high)
        lines.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#ddd"/>')
        lines.append(
            f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{10.0**power:g}</text>'
        )
    lines.append(
        f'<text x="{LEFT + PLOT_WIDTH / 2:.0f}" y="{bottom + 37}" text-anchor="middle">'
        "measured step time, seconds</text>"
    )
    lines.append(
        f'<text transform="translate(16 {TOP + PLOT_HEIGHT / 2:.0f}) rotate(-90)" '
        'text-anchor="middle">predicted / measured</text>'
    )
    return lines


def _dots(points: Sequence[Point], colour: str, low: int, high: int) -> str:
    """All points of a group as one path of round dots."""
    places = dict.fromkeys(
        f"M{_x(point.measured, low, high):.1f} {_y(point.predicted / point.measured):.1f}h0"
        for point in points
    )
    return (
        f'<path d="{"".join(places)}" stroke="{colour}" stroke-width="4.5" '
        'stroke-linecap="round" stroke-opacity="0.55" fill="none"/>'
    )


def _legend(groups: Sequence[str], points: Sequence[Point]) -> list[str]:
    lines = []
    for index, name in enumerate(groups):
        y = TOP + 14 + 20 * index
        count = sum(point.group == name for point in points)
        colour = COLOURS[index % len(COLOURS)]
        lines.append(f'<circle cx="{LEFT + PLOT_WIDTH + 18}" cy="{y - 4}" r="5" fill="{colour}"/>')
        lines.append(f'<text x="{LEFT + PLOT_WIDTH + 30}" y="{y}">{name} ({count})</text>')
    return lines
