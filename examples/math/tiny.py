"""The warm start of a tiny model for the problems: it calls the calculator with the numbers of the question.

It answers with the calculator's result. It does not know which operation a wording means, nor that one call is enough.
"""

from __future__ import annotations

import random
from typing import Any

from examples import group_learning
from examples.math import world
from examples.tiny_model import Demonstration, Recipe

STEPS, BATCH = 330, 24
SHORT = 230  # steps with one call each, to learn to copy numbers before copying those of an earlier call
TRAINING = range(4000)  # seeds of problems
HELD_OUT = range(1_000_000, 1_000_200)
DEMONSTRATED = 2_000_000  # first seed of the demonstration problems, which are in neither range
PROMPT = "Solve the problem with the calculator. End with the line Answer: and the number."  # as in both agents
REMINDER = (  # of AgentScope 2, before the first chat
    "<system-reminder>Treat the following as the ground truth at this point of the conversation. Anything stated "
    "earlier is outdated, and a later reminder, if any, supersedes this one:\n<current-time>{time}</current-time>\n"
    "<timezone>UTC</timezone>\n</system-reminder>"
)

ENGINE = {"max_model_len": 768, "tool_parser": "hermes"}
TRAINER = group_learning.TRAINER | {"epochs": 2}
LEARN = group_learning.LEARN | {"at_once": 40, "params": {"max_tokens": 60}}


def recipe(agentscope: int) -> Recipe:
    """Return the recipe: random operations, first in one call, later in one to three; the last result is the answer."""
    counts = [(1,)] * (SHORT * BATCH) + [(1, 1, 2, 2, 3)] * ((STEPS - SHORT) * BATCH)
    return Recipe(
        demonstrations=[_conversation(DEMONSTRATED + n, agentscope, calls) for n, calls in enumerate(counts)],
        teaches="to use the calculator",
        vocabulary=900,
        context=768,
        steps=STEPS,
        batch=BATCH,
        has_tools=True,
    )


def _conversation(seed: int, agentscope: int, calls: tuple[int, ...]) -> Demonstration:
    draw, problem = random.Random(seed), world.make_problem(seed)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": PROMPT},
        {"role": "user", "content": problem.question},
    ]
    if agentscope == 2:
        day = f"2026-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}"
        time = f"{day}T{draw.randint(0, 23):02}:{draw.randint(0, 59):02}:{draw.randint(0, 59):02}"
        messages.append({"role": "user", "content": REMINDER.format(time=time)})
    result = ""
    for _ in range(draw.choice(calls)):
        arguments = {"operation": draw.choice(tuple(world.WORDINGS)), "a": problem.a, "b": problem.b}
        result = world.calculate(**arguments)  # type: ignore[arg-type]
        call = {"type": "function", "function": {"name": "calculate", "arguments": arguments}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "content": f"= {result}"})
    messages.append({"role": "assistant", "content": f"Answer: {result}"})
    properties: dict[str, dict[str, str]] = {name: {} for name in ("operation", "a", "b")}
    tool = {"type": "function", "function": {"name": "calculate", "parameters": {"properties": properties}}}
    return Demonstration(messages, [tool])
