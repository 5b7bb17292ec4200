"""The report: rewards of production and of the trainee over time, as one HTML file with an SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, EDGE = 860, 360, 40
WINDOW = 60  # calls that a point averages
Points = Sequence[tuple[float, float]]  # (seconds since the start, reward from 0 to 1)


def moving_mean(points: Points, window: int = WINDOW) -> list[tuple[float, float]]:
    """Return means of the last `window` values, thinned to fewer than 600 points.

    >>> moving_mean([(0, 1.0), (1, 0.0), (2, 0.0)], 2)
    [(0, 1.0), (1, 0.5), (2, 0.0)]
    """
    found = []
    every = max(1, len(points) // 300)
    for end in range(1, len(points) + 1):
        if end % every == 0 or end == len(points):
            last = [worth for _, worth in points[max(0, end - window) : end]]
            found.append((points[end - 1][0], sum(last) / len(last)))
    return found


def draw(file: Path, production: Points, shadow: Points, figures: dict[str, Any]) -> None:
    """Write the chart with a table of figures below it."""
    lines = [("production", "#888", production), ("shadow: the model that learns", "#06c", shadow)]
    until_s = max([at for _, _, points in lines for at, _ in points], default=1.0) or 1.0
    drawn = "".join(_line(moving_mean(points), until_s, colour) for _, colour, points in lines)
    legend = "".join(f'<span style="color:{colour}">&#9632;</span> {escape(name)} &nbsp; ' for name, colour, _ in lines)
    grid = "".join(_level(worth) for worth in (0.0, 0.25, 0.5, 0.75, 1.0))
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in figures.items())
    file.write_text(
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Shadow traffic</title>'
        "<style>body{font:16px sans-serif;max-width:56em;margin:2em auto}th{text-align:left;padding-right:2em}"
        "svg{width:100%}</style><h1>Production answers; the trainee learns beside it</h1>"
        f'<p>{legend}</p><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Reward over time">{grid}{drawn}'
        f'<text x="{WIDTH - EDGE}" y="{HEIGHT - 8}" text-anchor="end">{until_s / 60:.1f} minutes</text></svg>'
        f"<table>{rows}</table></html>\n",
        encoding="utf-8",
    )


def _place(at_s: float, worth: float, until_s: float) -> str:
    x = EDGE + at_s / until_s * (WIDTH - 2 * EDGE)
    return f"{x:.1f},{EDGE + (1 - worth) * (HEIGHT - 2 * EDGE):.1f}"


def _line(points: Points, until_s: float, colour: str) -> str:
    places = " ".join(_place(at, worth, until_s) for at, worth in points)
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2.5"/>'


def _level(worth: float) -> str:
    y = EDGE + (1 - worth) * (HEIGHT - 2 * EDGE)
    return (
        f'<line x1="{EDGE}" x2="{WIDTH - EDGE}" y1="{y}" y2="{y}" stroke="#ddd"/>'
        f'<text x="{EDGE - 6}" y="{y + 5}" text-anchor="end">{worth:g}</text>'
    )
