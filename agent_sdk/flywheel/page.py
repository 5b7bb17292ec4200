"""The report of learn as a page: a plot of the rewards, the figures, and the evaluations."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flywheel.report import Evaluation, Report

WIDTH, HEIGHT = 800, 240
_STYLE = (
    "body{font:16px sans-serif;max-width:50em;margin:2em auto}td,th{padding:.2em 1em;text-align:left}"
    "svg{width:100%;overflow:visible}"
)
_EVALUATED = "#c2410c"


def page(report: Report, rewards: list[float]) -> str:
    """Return the page. rewards: of the runs, in the order of their ends."""
    figures = [
        (name.replace("_", " "), _text(value)) for name, value in asdict(report).items() if name != "evaluations"
    ]
    columns = ("version", "after runs", "reward", "solved", "runs", "failed")
    evaluations = [_cells(one) for one in report.evaluations]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(report.name)}</title>'
        f"<style>{_STYLE}</style><h1>{html.escape(report.name)}</h1>{picture(rewards, report)}"
        f"<table>{_rows(figures)}</table>"
        f"<h2>Evaluations</h2><table>{_row(columns, 'th')}{_rows(evaluations)}</table></html>\n"
    )


def _cells(one: Evaluation) -> list[Any]:
    failed = f"{one.failed} ({_text(one.failures)})" if one.failures else one.failed
    reward = f"{one.mean:.3f} ± {one.standard_error:.3f}"
    return [one.version, one.after_runs, reward, f"{one.solved:.3f}", one.n, failed]


def picture(rewards: list[float], report: Report) -> str:
    """Plot the mean reward over the runs, in a hundred steps, and the evaluations with their standard errors.

    The place of an evaluation is the share of all runs that ended before it: some of them may have no reward.
    """
    if len(rewards) < 2:
        return ""
    steps = min(100, len(rewards))
    cuts = [number * len(rewards) // steps for number in range(steps + 1)]
    means = [sum(rewards[a:b]) / (b - a) for a, b in pairwise(cuts)]
    found = [(one.after_runs, one.mean, one.standard_error) for one in report.evaluations if one.n]
    most = max(report.runs, len(rewards))
    points = [(min(1.0, runs / most) * WIDTH, mean, error) for runs, mean, error in found if runs is not None]
    ends = [mean + sign * error for _, mean, error in points for sign in (-1, 1)]
    low, high = min(0.0, *means, *ends), max(1.0, *means, *ends)

    def y(reward: float) -> float:
        return HEIGHT - (reward - low) / (high - low) * HEIGHT

    places = " ".join(f"{number * WIDTH / (steps - 1):.1f},{y(mean):.1f}" for number, mean in enumerate(means))
    line = f'<polyline points="{places}" fill="none" stroke="currentColor" stroke-width="2"/>'
    marks = "".join(
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y(mean - error):.1f}" y2="{y(mean + error):.1f}" stroke="{_EVALUATED}"/>'
        f'<circle cx="{x:.1f}" cy="{y(mean):.1f}" r="5" fill="{_EVALUATED}"/>'
        for x, mean, error in points
    )
    label = f"Line: mean reward over {len(rewards)} runs, from {low:.3g} to {high:.3g}."
    label += " Points: evaluations, with their standard errors." if points else ""
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{line}{marks}</svg><p>{label}</p>'


def _rows(rows: Iterable[Iterable[Any]]) -> str:
    return "".join(_row(cells, "td") for cells in rows)


def _row(cells: Iterable[Any], kind: str) -> str:
    return "<tr>" + "".join(f"<{kind}>{html.escape(str(cell))}</{kind}>" for cell in cells) + "</tr>"


def _text(value: Any) -> str:
    """Format a figure: numbers are rounded, counts by cause are listed.

    >>> _text(0.0535931790499391), _text({"TimedOut": 2}), _text({}), _text(None)
    ('0.05359', 'TimedOut: 2', 'none', '')
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {count}" for name, count in value.items()) or "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)
