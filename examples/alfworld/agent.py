"""The agent: the model gets the rules once, and an observation after each action."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flywheel

from examples.alfworld.world import MAX_STEPS, Households

RULES = """You are in a house and have a task to do there. You are told what you see, and answer with one action.
Furniture and things have names with a number, such as `cabinet 2`. These actions exist:
go to FURNITURE; open FURNITURE; close FURNITURE; take THING from FURNITURE; move THING to FURNITURE;
heat THING with FURNITURE; cool THING with FURNITURE; clean THING with FURNITURE; use LAMP; examine NAME;
look; inventory.
You can carry one thing, and reach only what you have gone to. "Nothing happens" means that an action was not possible.
You may think first. End with the action, and nothing after it: <action>go to cabinet 2</action>"""


class Agent:
    """The agent, with a pool of households to work in."""

    def __init__(self, rules: str = RULES, max_steps: int = MAX_STEPS) -> None:
        self._rules, self._max_steps, self._households = rules, max_steps, Households(max_steps)

    async def __call__(self, task: Mapping[str, Any], model: flywheel.Model) -> flywheel.Played:
        """Do one task."""
        with self._households.enter(task) as house:
            return await flywheel.play(house, model, system=self._rules, max_turns=self._max_steps)
