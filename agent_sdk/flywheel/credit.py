"""The credit of a run: how its reward is distributed over its messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from flywheel.errors import ConfigError
from flywheel.wire import feedback_body

Credit = Literal["once", "each"] | Callable[[float, Sequence[str]], Sequence[float]]


def check_credit(credit: Credit) -> None:
    """Raise ConfigError for an unknown credit."""
    if not callable(credit) and credit not in ("once", "each"):
        raise ConfigError(f'credit={credit!r}: give "once", "each" or a function of the reward and the message ids')


def outcome_bodies(
    credit: Credit, task_id: str, run_id: str, msg_ids: Sequence[str], said: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the bodies of the feedback about a run. said: its reward and the rest, as they are sent.

    >>> outcome_bodies(lambda reward, ids: [reward] * len(ids), "t", "0", ["m"], {"reward": 1.0})
    [{'msg_ids': ['m'], 'reward': 1.0}]
    """
    reward = said.get("reward")
    if not callable(credit) or reward is None or not msg_ids:
        return [feedback_body([], task_id, run_id, {**said, "each": credit == "each"})]
    shares = list(credit(reward, msg_ids))
    if len(shares) != len(msg_ids):
        raise ConfigError(f"credit gave {len(shares)} rewards for {len(msg_ids)} messages; give one for each")
    rest = {name: value for name, value in said.items() if name != "reward"}
    own = [feedback_body(m, None, None, {"reward": share}) for m, share in zip(msg_ids, shares, strict=True)]
    return ([feedback_body([], task_id, run_id, rest)] if rest else []) + own
