"""The reward: 1 for the due action, else 0. People give the rewards for training; this module gives true rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from examples.shadow.world import REFUND, Ticket, action_of


def reward(ticket: Ticket, reply: str | None, attempts: Sequence[tuple[str, Mapping[str, Any]]] = ()) -> dict[str, Any]:
    """Return the reward of a reply. attempts: the run's calls of writing tools."""
    action = action_of(reply, attempts, ticket.order)
    return {
        "reward": float(action == ticket.due),
        "metrics": {"valid": float(action is not None), "refunds": float(action == REFUND)},
    }
