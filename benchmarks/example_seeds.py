"""What does an example learn, over several seeds? One run after the other, each as `flywheel demo NAME`.

A run that is already in DIRECTORY is not repeated, so seeds can be added later. If this program ends, so does a run.
Prints JSON: the line of each run, with what its trainer counted (turns merged as a fraction of those that continue a
run, rows quarantined), and means over the seeds. A standard error is that of the mean over seeds.

    .venv/bin/python -m benchmarks.example_seeds frozen_lake DIRECTORY [--seeds 0 1 2 3 4] [--picture FILE.svg]
        [OPTIONS OF THE EXAMPLE, such as --minutes 5 or --shuffled]
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.process import die_with_parent

WINDOW = 400  # runs whose mean reward is a point of the curve
CONTINUED = ("turns_merged", "turns_rewritten", "turns_branch", "turns_apart")  # turns that continue a run
COLOUR, SHUFFLED = "#1f6f8b", "#999999"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--picture", type=Path, help="draw the reward of training, and of controls in DIRECTORY")
    args, options = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # ends the demo that it started
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would demos
    roots = [args.folder / "-".join([args.name, str(seed), *(o.strip("-") for o in options)]) for seed in args.seeds]
    runs = [_run(args.name, seed, root, options) for seed, root in zip(args.seeds, roots, strict=True)]
    if args.picture:
        controls = [file.with_suffix("") for file in sorted(args.folder.glob(f"{args.name}-*shuffled*.json"))]
        draw({**dict.fromkeys(roots, COLOUR), **dict.fromkeys(controls, SHUFFLED)}, args.picture)
    print(json.dumps({"example": args.name, "options": options, "mean": summarise(runs), "seeds": runs}))


def _run(name: str, seed: int, root: Path, options: list[str]) -> dict[str, Any]:
    """The JSON line of a run, stored or made now."""
    line = root.with_name(f"{root.name}.json")
    if not line.exists():
        print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "services.cli", "demo", name, "--seed", str(seed), "--root", str(root)]
        line.write_text(_output([*command, *options]).splitlines()[-1] + "\n", encoding="utf-8")
    found: dict[str, Any] = json.loads(line.read_text(encoding="utf-8"))
    return found | counted(root / "data/trainer/trainer/figures.jsonl")


def _output(command: list[str]) -> str:
    """What a demo prints. If this process ends first, for any reason, the demo is interrupted, and ends in order."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,  # an interruption from the terminal comes once: from here
        preexec_fn=die_with_parent(signal.SIGINT),  # noqa: PLW1509 — one prctl call, no lock
    )
    try:
        said, _ = process.communicate()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return said


def counted(figures: Path) -> dict[str, float | None]:
    """What a trainer counted, from its file of figures."""
    total = Counter[str]()
    for line in figures.read_text(encoding="utf-8").splitlines():
        step = json.loads(line)
        total.update({name: step.get(name, 0) for name in (*CONTINUED, "rows_quarantined")})
    turns = sum(total[name] for name in CONTINUED)
    merged = round(total["turns_merged"] / turns, 4) if turns else None
    return {"merged": merged, "rows_quarantined": total["rows_quarantined"]}


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the runs of each figure of the evaluations, before and after; and how many runs improved.

    failures: runs of training that failed. evaluations_failed: runs of both evaluations. merged_least: the smallest
    share of merged turns.
    """
    names = [name for name in runs[0]["before"] if name not in ("version", "n", "failed", "standard_error")]
    pairs = {name: [(run["before"][name], run["after"][name]) for run in runs] for name in names}
    return {
        "better": sum(after > before for before, after in pairs["reward"]),
        "of": len(runs),
        "failures": sum(sum(run["failures"].values()) for run in runs),
        "evaluations_failed": sum(run[side]["failed"] for run in runs for side in ("before", "after")),
        "rows_quarantined": sum(run["rows_quarantined"] for run in runs),
        "merged_least": min((run["merged"] for run in runs if run["merged"] is not None), default=None),
        "training": [_mean([run[end] for run in runs]) for end in ("reward_first", "reward_last")],
        **{name: [_mean(side) for side in zip(*values, strict=True)] for name, values in pairs.items()},
    }


def _mean(values: Sequence[float]) -> dict[str, float | None]:
    error = round(statistics.stdev(values) / math.sqrt(len(values)), 3) if len(values) > 1 else None
    return {"mean": round(statistics.mean(values), 3), "standard_error": error}


def curve(root: Path) -> tuple[list[int], list[float]]:
    """Number of ended runs, and the mean reward of the last WINDOW of them."""
    lines = (root / "episodes.jsonl").read_text(encoding="utf-8").splitlines()
    rewards = [found["reward"] for line in lines if (found := json.loads(line))["outcome"] == "rewarded"]
    ends = list(range(WINDOW, len(rewards) + 1, WINDOW // 8))
    return ends, [statistics.mean(rewards[end - WINDOW : end]) for end in ends]


def draw(colours: dict[Path, str], file: Path) -> None:
    """Draw the curves. colours: by the folder of the run."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "flywheel", "font.size": 8, "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(4.6, 2.4), layout="constrained")
    for root, colour in colours.items():
        axes.plot(*curve(root), color=colour, linewidth=1.0)
    axes.set(xlabel="runs", ylabel=f"reward, mean of {WINDOW} runs")
    axes.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
