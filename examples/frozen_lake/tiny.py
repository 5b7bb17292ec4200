"""The warm start of a tiny model for the lake: it walks at random and stays on the lake, but does not seek the goal."""

from __future__ import annotations

import random

from examples.frozen_lake.agent import RULES
from examples.frozen_lake.world import Lake, neighbours
from examples.tiny_model import Demonstration, Recipe

STEPS, BATCH = 250, 32
BACK = 0.5  # weight of a move back in the demonstrations; any other move has weight 1
TRAINING = range(2000)  # seeds of lakes
HELD_OUT = range(1_000_000, 1_000_200)
DEMONSTRATED = 2_000_000  # first seed of the demonstration lakes, which are in neither range

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
        "normalize_returns": False,  # rewards are already between 0 and 1
    },
}
LEARN = {"at_once": 24, "max_ready_rows": 256, "timeout_s": 60.0, "params": {"max_tokens": 12}}


def recipe() -> Recipe:
    """Return the recipe: random walks. A move is as likely to lead into a hole as anywhere else.

    A move back is half as likely as any other move. Greedy decoding of a model trained on uniform walks goes back and
    forth, so that any change to it, even a useless one, reaches the goal more often.
    """
    walks = [_walk(seed) for seed in range(DEMONSTRATED, DEMONSTRATED + STEPS * BATCH)]
    return Recipe(
        demonstrations=_in_like_batches(walks),
        teaches="to walk at random",
        vocabulary=700,
        context=768,
        steps=STEPS,
        batch=BATCH,
    )


def _in_like_batches(walks: list[Demonstration]) -> list[Demonstration]:
    """Batches of walks of like lengths, in random order: a batch is padded to its longest conversation."""
    ordered = sorted(walks, key=lambda walk: sum(len(message["content"]) for message in walk.messages))
    batches = [ordered[at : at + BATCH] for at in range(0, STEPS * BATCH, BATCH)]
    random.Random(STEPS).shuffle(batches)
    return [walk for together in batches for walk in together]


def _walk(seed: int) -> Demonstration:
    draw, lake = random.Random(seed), Lake(seed)
    observation, _ = lake.reset()
    messages, ended = [{"role": "system", "content": RULES}], False
    before: tuple[int, int] | None = None
    while not ended:
        ways = [(name, there) for name, there, _ in neighbours(lake.map, lake.place)]
        [(move, _)] = draw.choices(ways, [BACK if there == before else 1.0 for _, there in ways])
        before = lake.place
        messages += [{"role": "user", "content": observation}, {"role": "assistant", "content": f"```{move}```"}]
        observation, _, terminated, truncated, _ = lake.step(f"```{move}```")
        ended = terminated or truncated
    return Demonstration(messages)
