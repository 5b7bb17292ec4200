"""The reward, with the weights of the AgentScope article: correctness 3.0, steps -0.1, format 0.5."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flywheel import Reward
from flywheel.rewards import Weighted

FORM = re.compile(r"Answer: (-?\d+(?:\.\d+)?)\Z")
WEIGHTS = Weighted({"correctness": 3.0, "steps": -0.1, "format": 0.5})


def reward(task: Mapping[str, Any], reply: Mapping[str, Any]) -> Reward:
    """Return the reward of a run. An answer can be right only in the right format, with its whole number."""
    found = FORM.search(reply["answer"].strip())
    right = found is not None and float(found[1]) == float(task["answer"])
    return WEIGHTS({"correctness": float(right), "steps": float(reply["steps"]), "format": float(found is not None)})
