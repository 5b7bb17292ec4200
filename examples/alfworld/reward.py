"""The reward: 1 when the task is done, -0.1 when it is not. All other figures are only metrics."""

from __future__ import annotations

from flywheel import Played, Reward

from examples.alfworld.world import UNFINISHED, read_action


def reward(reply: Played) -> Reward:
    """Return the reward of an episode."""
    said = [message["content"] for message in reply.messages if message["role"] == "assistant"]
    formed = sum(read_action(one) is not None for one in said) / max(1, len(said))
    possible = reply.info.get("happened", 0) / max(1, reply.turns)
    metrics = {"env_done": float(reply.terminated), "env_rounds": float(reply.turns), "formed": formed}
    value = reply.reward if reply.terminated else UNFINISHED  # also if the model's context ended the episode
    return Reward(value, {**metrics, "possible": possible})
