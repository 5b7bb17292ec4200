"""Curves of the benchmark: reward by episodes, a line for each seed."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

SMOOTH = 5
PAGES: dict[str, tuple[str, ...]] = {  # file: cases
    "ppo": ("sparse/ppo",),
    "reinforce_pp": ("sparse/reinforce_pp",),
    "spo": ("sparse/spo",),
    "grpo": ("tasks/grpo",),
    "rloo": ("tasks/rloo",),
    "step_grpo": ("tasks/step_grpo",),
    "raft": ("sparse/raft",),
    "distill": ("sparse/distill",),
    "kto": ("sparse/kto", "sparse/kto without its taper"),
    "hint": ("comments/hint", "comments/hint of other rows", "comments/hint by sampled tokens"),
    "sft": ("corrections/sft",),
    "dpo": ("corrections/dpo",),
    "sparse": ("sparse/ppo", "sparse/reinforce_pp", "sparse/spo", "sparse/kto", "sparse/hint", "sparse/mix"),
    "surrogates": ("old/clip", "old/clip truncated", "old/topr", "old/masks"),
}
COLOURS = ("#1f6f8b", "#c8553d", "#588157", "#7d5ba6", "#e09f3e", "#444444")


def draw(found: dict[str, Any], folder: Path) -> None:
    """Draw a picture for each page that has cases."""
    folder.mkdir(parents=True, exist_ok=True)
    for page, cases in PAGES.items():
        known = [case for case in cases if case in found]
        if known:
            _draw_one({case: found[case]["seeds"] for case in known}, folder / f"{page}.svg")


def _draw_one(cases: dict[str, Any], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "flywheel", "font.size": 8, "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(4.6, 2.4), layout="constrained")
    for colour, (case, seeds) in zip(COLOURS, cases.items(), strict=False):
        for number, run in enumerate(seeds.values()):
            rewards = run["rewards"]
            smooth = [statistics.mean(rewards[max(0, n - SMOOTH + 1) : n + 1]) for n in range(len(rewards))]
            axes.plot(smooth, color=colour, linewidth=1.0, label=None if number else case)
    axes.set(xlabel="versions", ylabel="reward", ylim=(0, 1.02))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize=7)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
