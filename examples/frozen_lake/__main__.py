"""python -m examples.frozen_lake: a model learns to walk over frozen lakes."""

from __future__ import annotations

import sys

from examples.frozen_lake import tiny
from examples.frozen_lake.agent import agent
from examples.frozen_lake.reward import reward
from examples.frozen_lake.world import make_map
from examples.run import Example, parser, run

ABOUT = "A model learns to walk over 4 by 4 frozen lakes: reward 1 at the goal, in at most 8 moves."


def example() -> Example:
    """Return the example, with the settings with which a tiny model learns."""
    held_out = [make_map(seed) for seed in tiny.HELD_OUT]
    return Example(
        name="frozen_lake",
        about=ABOUT,
        workflow=agent,
        judge=reward,
        tasks=[{"seed": seed} for seed in tiny.TRAINING if make_map(seed) not in held_out],
        held_out=[{"seed": seed} for seed in tiny.HELD_OUT],
        recipe=tiny.recipe,
        engine=tiny.ENGINE,
        trainer=tiny.TRAINER,
        learn=tiny.LEARN,
    )


if __name__ == "__main__":
    sys.exit(run(example(), parser("frozen_lake", ABOUT).parse_args()))
