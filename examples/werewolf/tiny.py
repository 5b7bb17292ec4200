"""The warm start of a tiny model for the game: it answers with a random living player, even with its fellow wolf."""

from __future__ import annotations

import random
from typing import Any

from examples.tiny_model import Demonstration, Recipe
from examples.werewolf.world import Game, role, villager

GAMES = 6000  # demonstrations
TRAINING = range(3000)  # seeds of games
HELD_OUT = range(1_000_000, 1_000_100)
DEMONSTRATED = 2_000_000  # first seed of the demonstration games, which are in neither range
RULES = "Werewolf."  # replaces the agents' rules: a tiny model cannot use the words

CONTEXT = 1280  # tokens; the longest game of self-play needs nearly all

ENGINE = {"max_model_len": CONTEXT}
TRAINER = {
    "algorithm": "ppo",
    "batch_size": 192,
    "max_staleness_versions": 4,
    "learning_rate": 2.5e-4,
    "max_tokens_per_micro_batch": 1536,
    "epochs": 2,
    "minibatches": 4,
    "ppo": {
        "lam": 0.95,
        "kl_coef": 0.005,
        "entropy_coef": 0.005,
        "critic_learning_rate": 1.0e-3,
        "value_clip": 0.0,
        "normalize_returns": False,  # rewards are already between -0.5 and 1.7
    },
}
LEARN = {"at_once": 16, "max_ready_rows": 256, "timeout_s": 60.0, "params": {"max_tokens": 4}}


def recipe() -> Recipe:
    """Return the recipe: games in which wolves, and sometimes a villager, name a random living player."""
    return Recipe(
        demonstrations=[_view(DEMONSTRATED + number) for number in range(GAMES)],
        teaches="to name a living player",
        vocabulary=500,
        context=CONTEXT,
        steps=220,
        batch=24,
    )


def _view(seed: int) -> Demonstration:
    """Return a game from the view of one of its players."""
    draw, game = random.Random(seed), Game(seed)
    wolves = sorted(game.wolves)
    seen = draw.choice(wolves if draw.random() < 0.75 else [name for name in game.seats if name not in wolves])
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"{RULES} {role(game, seen)}"}]
    while names := game.turn():
        answers = {}
        for name in names:
            by_script = name not in game.wolves and name != seen
            answers[name] = villager(game, name) if by_script else draw.choice([x for x in game.alive if x != name])
        if seen in answers:
            messages += [
                {"role": "user", "content": game.tell(seen)},
                {"role": "assistant", "content": answers[seen]},
            ]
        game.take(answers)
    return Demonstration(messages)
