"""The warm start of a tiny model for the problems: it answers with a random number, half of the time in the format.

A model of half a million parameters cannot reason. It gets short problems with answers up to 20, and can learn the
format and the typical answers of each kind of problem.
"""

from __future__ import annotations

import random

from examples import group_learning
from examples.gsm8k.agent import PROMPT
from examples.gsm8k.world import CannotRead, Problem, fits, generated, split
from examples.tiny_model import Demonstration, Recipe

LONGEST, LARGEST = 320, 20
STEPS, BATCH = 220, 32

ENGINE = {"max_model_len": 256}
TRAINER = group_learning.TRAINER
LEARN = group_learning.LEARN | {"params": {"max_tokens": 12}}


def problems() -> tuple[list[Problem], list[Problem]]:
    """Return the training problems and the held-out problems of a tiny model."""
    return split(generated(2200, seed=1, longest=LONGEST, largest=LARGEST))


def short(problems: list[Problem], source: str) -> list[Problem]:
    """Return the problems of a file that a tiny model can read and answer."""
    found = [problem for problem in problems if fits(problem, LONGEST, LARGEST)]
    if len(found) < 20:
        raise CannotRead(
            f"--data {source}: {len(found)} of its {len(problems)} problems have at most {LONGEST} characters and an "
            f"answer up to {LARGEST}, too few for a tiny model; give --url with a larger one"
        )
    return found


def recipe() -> Recipe:
    """Return the recipe: answers with numbers that are independent of the question."""
    draw, demonstrations = random.Random(20), []
    for problem in generated(STEPS * BATCH, seed=2, longest=LONGEST, largest=LARGEST):
        number = draw.randint(0, LARGEST)
        messages = [
            {"role": "system", "content": PROMPT},
            {"role": "user", "content": problem["question"]},
            {"role": "assistant", "content": draw.choice((f"#### {number}", f"It is {number}"))},
        ]
        demonstrations.append(Demonstration(messages))
    return Recipe(
        demonstrations=demonstrations,
        teaches="to answer with a number",
        vocabulary=1600,
        context=256,
        steps=STEPS,
        batch=BATCH,
    )
