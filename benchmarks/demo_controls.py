"""What changes the reward of the demo? The same episodes unchanged, without a trainer, and with shuffled feedback.

The counted reward is always the honest one. With `shuffled`, each customer's feedback goes to another customer's
answer, and the teacher of `distill` was shown the answers to other tickets.
Prints one JSON line. About 5 minutes for each run of all episodes.

    .venv/bin/python -m benchmarks.demo_controls [--algorithms sft kto …] [--episodes 8200] [--seed 0] [--only shuffled]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from examples.support_desk import base_model
from examples.support_desk.customers import Voice
from examples.support_desk.desk import Ticket
from examples.support_desk.view import View
from services.commands.demo import LESSONS
from services.demo import EPISODES, Plan, as_json, play_demo

POOL = 200  # feedback from which one is drawn
RUNS = ("as_it_is", "no_trainer", "shuffled")


def shuffled(voice: Voice, draw: random.Random) -> Voice:
    """The same feedback, each for an answer that it does not belong to."""
    waiting: list[dict[str, Any]] = []

    def say(ticket: Ticket, worth: float) -> dict[str, Any]:
        waiting.append(voice(ticket, worth))
        if len(waiting) <= POOL:
            return draw.choice(waiting)
        return waiting.pop(draw.randrange(len(waiting) - 1))

    return say


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=LESSONS, default=["ppo"])
    parser.add_argument("--episodes", type=int, default=EPISODES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=RUNS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flywheel-controls-") as folder, View(quiet=True) as view:
        results = {name: _play(Path(folder), view, name, args) for name in args.algorithms}
    print(json.dumps(results))


def _play(folder: Path, view: View, algorithm: str, args: argparse.Namespace) -> dict[str, Any]:
    plan, found = Plan(algorithm, seed=args.seed), {}
    for run in args.only:
        root, report = folder / f"{algorithm}-{run}", folder / f"{algorithm}-{run}.png"
        is_shuffled = run == "shuffled"
        outcome = play_demo(
            root,
            view,
            plan=plan,
            episodes=args.episodes,
            voice=shuffled(plan.voice, random.Random(args.seed)) if is_shuffled else None,
            teacher=base_model.misled_teacher if is_shuffled else base_model.teacher,
            with_trainer=run != "no_trainer",
            report=report,
        )
        found[run] = as_json(outcome)
    return found


if __name__ == "__main__":
    main()
