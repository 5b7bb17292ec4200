"""What makes a tiny model for the lake: it walks at random and stays on the lake, and does not know where to go."""

from __future__ import annotations

import random

from examples.frozen_lake.agent import RULES
from examples.frozen_lake.world import Lake, neighbours
from examples.tiny_model import Demonstration, Recipe

EPISODES = 8000
TRAINING = range(2000)  # seeds of lakes
HELD_OUT = range(1_000_000, 1_000_200)
DEMONSTRATED = 2_000_000  # the first seed of lakes that are neither

ENGINE = {"max_model_len": 768}
TRAINER = {
    "algorithm": "ppo",
    "batch_size": 256,
    "max_staleness_versions": 4,
    "learning_rate": 3.0e-4,
    "max_tokens_per_micro_batch": 1024,
    "epochs": 2,
    "minibatches": 4,
    "ppo": {
        "lam": 0.9,
        "kl_coef": 0.01,
        "entropy_coef": 0.01,
        "critic_learning_rate": 1.0e-3,
        "value_clip": 0.0,
        "normalize_returns": False,  # rewards lie between 0 and 1 already
    },
}
LEARN = {"at_once": 24, "max_ready_rows": 256, "timeout_s": 60.0, "params": {"max_tokens": 12}}


def recipe() -> Recipe:
    """Random walks: each move stays on the lake, and is as likely to lead into a hole as anywhere else."""
    return Recipe(
        demonstrations=[_walk(seed) for seed in range(DEMONSTRATED, DEMONSTRATED + EPISODES)],
        teaches="to walk at random",
        vocabulary=700,
        context=768,
        steps=250,
        batch=32,
    )


def _walk(seed: int) -> Demonstration:
    draw, lake = random.Random(seed), Lake(seed)
    observation, _ = lake.reset()
    messages, ended = [{"role": "system", "content": RULES}], False
    while not ended:
        move = draw.choice([name for name, _, _ in neighbours(lake.map, lake.place)])
        messages += [{"role": "user", "content": observation}, {"role": "assistant", "content": f"```{move}```"}]
        observation, _, terminated, truncated, _ = lake.step(f"```{move}```")
        ended = terminated or truncated
    return Demonstration(messages)
