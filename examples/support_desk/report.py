"""report.png: reward over episodes, with a mark where each version entered service."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.support_desk.customers import Episode

WINDOW = 200  # episodes in the moving average
START = 40  # episodes before the first point; a mean of fewer is noise
INK, GREEN, BLUE, ORANGE, GREY = "#1b1f24", "#1a7f4b", "#2563a8", "#c2611f", "#9aa4b0"


def first_and_last_tenth(episodes: Sequence[Episode]) -> tuple[float, float]:
    """Return the mean reward of the first and of the last tenth of the episodes."""
    tenth = max(1, len(episodes) // 10)
    rewards = [e.reward for e in episodes]
    return float(np.mean(rewards[:tenth])), float(np.mean(rewards[-tenth:]))


def draw_report(file: Path, episodes: Sequence[Episode], served: Sequence[tuple[int, float]], title: str) -> None:
    """Draw the chart. served: (version, Unix seconds when it entered service)."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 6), dpi=130)
    ends = [e.at for e in episodes]
    marks = [(version, bisect.bisect_left(ends, at)) for version, at in served]
    _draw_marks(axes, marks, len(episodes))
    x = np.arange(1, len(episodes) + 1)
    for values, colour, label, width in (
        ([e.desk_right for e in episodes], BLUE, "right desk (share)", 1.4),
        ([e.priority_right for e in episodes], ORANGE, "right priority (share)", 1.4),
        ([e.reward for e in episodes], GREEN, "reward", 3.0),
    ):
        smooth = moving_average(values, WINDOW)
        axes.plot(x[START:], smooth[START:], color=colour, lw=width, label=label, solid_capstyle="round")
    first, last = first_and_last_tenth(episodes)
    tenth = max(1, len(episodes) // 10)
    for level, start, end, offset in ((first, 1, tenth, -0.075), (last, len(episodes) - tenth, len(episodes), -0.095)):
        axes.hlines(level, start, end, color=INK, lw=1.6, zorder=5)
        axes.annotate(
            f"{level:.2f}", ((start + end) / 2, level + offset), ha="center", weight="bold", color=INK, size=13
        )
    _style_axes(axes, title, len(episodes), len(marks))
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


def moving_average(values: Sequence[float], window: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return at each point the mean of the last `window` values, or of all values so far if there are fewer."""
    total = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    index = np.arange(1, len(values) + 1)
    begin = np.maximum(0, index - window)
    means: np.ndarray[Any, np.dtype[np.float64]] = (total[index] - total[begin]) / (index - begin)
    return means


def _draw_marks(axes: Any, marks: Sequence[tuple[int, int]], episodes: int) -> None:
    """Draw a thin line where each version entered service, and number some of them."""
    every = max(1, len(marks) // 12)
    for position, (version, episode) in enumerate(marks):
        if 0 < episode < episodes:
            axes.axvline(episode, color=GREY, lw=0.6, alpha=0.45, zorder=0)
            if position % every == 0:
                axes.text(episode, 1.035, f"v{version}", ha="center", va="bottom", size=8, color=GREY)


def _style_axes(axes: Any, title: str, episodes: int, versions: int) -> None:
    axes.set_xlim(0, episodes)
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("episodes (tickets answered and rated)", color=INK)
    axes.set_ylabel(f"mean of the last {WINDOW}", color=INK)
    axes.set_title(title, loc="left", pad=44, size=14, weight="bold", color=INK)
    axes.text(
        0,
        1.08,
        f"{episodes:,} episodes · {versions} versions came into service while chats went on (grey lines)",
        transform=axes.transAxes,
        size=10,
        color=INK,
    )
    axes.grid(axis="y", color=GREY, alpha=0.25, lw=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
