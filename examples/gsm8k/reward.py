r"""The reward: 1 for the right number after `####` or in \boxed{…}, and 0.1 for either format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flywheel import Reward, rewards

from examples.gsm8k.agent import PROMPT


def reward(task: Mapping[str, Any], reply: str) -> Reward:
    """Return the reward of an answer. One that repeats question or prompt has neither format, and earns nothing."""
    reply = reply.replace(PROMPT, "")
    if rewards.in_box(reply) is None and "####" not in reply:
        return Reward(0.0, {"correctness": 0.0, "format": 0.0})
    return rewards.gsm8k(reply, task["answer"])
