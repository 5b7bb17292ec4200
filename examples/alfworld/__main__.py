"""python -m examples.alfworld: a model learns household tasks in ALFWorld's houses."""

from __future__ import annotations

import sys
from argparse import Namespace

from examples.alfworld import tiny
from examples.alfworld.agent import Agent
from examples.alfworld.reward import reward
from examples.alfworld.world import downloaded
from examples.run import Example, parser, run

ABOUT = "A model learns household tasks in ALFWorld's houses: reward 1.0 when done, -0.1 when not, 30 steps at most."
TRAINING, HELD_OUT = 1000, 100  # numbers of generated houses, used with --url


def example(args: Namespace) -> Example:
    """Return the example. Without --url, a tiny model learns in small houses."""
    seen = args.houses == "seen"
    if args.url:
        tasks = downloaded("train") or [{"seed": seed} for seed in range(TRAINING)]
        generated = [{"seed": 10**6 + seed, "seen": seen} for seed in range(HELD_OUT)]
        held_out = downloaded(args.houses) or generated
    else:
        tasks = [tiny.task(seed) for seed in tiny.TRAINING]
        held_out = [{**tiny.task(seed), "seen": seen} for seed in tiny.HELD_OUT]
    return Example(
        name="alfworld",
        about=ABOUT,
        workflow=Agent() if args.url else Agent(tiny.RULES, tiny.MAX_STEPS),
        judge=reward,
        tasks=tasks,
        held_out=held_out,
        recipe=tiny.recipe,
        engine=tiny.ENGINE,
        trainer=tiny.TRAINER,
        learn=tiny.LEARN,
    )


if __name__ == "__main__":
    options = parser("alfworld", ABOUT)
    options.add_argument(
        "--houses", choices=("seen", "unseen"), default="seen", help="evaluate in houses of these plans"
    )
    arguments = options.parse_args()
    sys.exit(run(example(arguments), arguments))
