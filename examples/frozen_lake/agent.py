"""The agent: a model that crosses a frozen lake. It gets the rules once, and its position after each move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flywheel

from examples.frozen_lake.world import MAX_STEPS, Lake

RULES = (
    "You walk over a frozen lake. P is you, _ is frozen, O is a hole, G is the goal. Reach the goal, and never step "
    "into a hole. The moves are Left, Down, Right and Up. End each answer with your move between three backquotes, "
    "such as ```Up```."
)


async def agent(task: Mapping[str, Any], model: flywheel.Model) -> flywheel.Played:
    """Play one lake."""
    return await flywheel.play(Lake(**task), model, system=RULES, max_turns=MAX_STEPS)
