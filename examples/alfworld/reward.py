"""The reward: 1 when the task is done, -0.1 when it is not. All other figures are only metrics."""

from __future__ import annotations

from flywheel import Played, Reward

from examples.alfworld.world import UNFINISHED, read_action


def reward(reply: Played) -> Reward:
    """Return the reward of an episode."""
    said = [message["content"] for message in reply.messages if message["role"] == "assistant"]
    answered = [message["content"] for message in reply.messages if message["role"] == "user"][1:]
    formed = sum(read_action(one) is not None for one in said) / max(1, len(said))
    moved = 1.0 - sum(one == "Nothing happens." for one in answered) / max(1, len(said))
    metrics = {"env_done": float(reply.terminated), "env_rounds": float(reply.turns), "formed": formed}
    value = reply.reward if reply.terminated else UNFINISHED  # also if the model's context ended the episode
    return Reward(value, {**metrics, "possible": formed * moved})
