"""The reward: 1 at the goal, else 0. The number of turns and the fraction of valid moves are only metrics."""

from __future__ import annotations

from flywheel import Played, Reward

from examples.frozen_lake.world import read_move


def reward(reply: Played) -> Reward:
    """Return the reward of an episode."""
    said = [message["content"] for message in reply.messages if message["role"] == "assistant"]
    valid = sum(read_move(one) is not None for one in said) / max(1, len(said))
    return Reward(reply.reward, {"success": reply.reward, "turns": float(reply.turns), "valid": valid})
