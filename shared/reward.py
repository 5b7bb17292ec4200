"""From signals to a reward: the rule of the `reward` section. What is stored stays raw, so the rule may change.

r = clip( e + Σ_m w_m · metric_m )      e: the last reward said; without one, the last rating's value
of each signal the last one said counts; a row of which none of these was said has no reward
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from shared.config import RewardConfig

_LARGEST = sys.float_info.max

Kind = Literal["reward", "rating", "metric", "comment", "correction", "preferred_over"]


@dataclass(frozen=True, slots=True)
class Signal:
    """One thing that a user or code said about a message.

    value: of a reward or metric. name: of a metric. text: of a rating ("up", "down"), comment, correction, or the
    message id that this one is preferred over.
    """

    kind: Kind
    value: float | None = None
    name: str | None = None
    text: str | None = None


def reward_of(said: Iterable[Signal], rule: RewardConfig) -> float | None:
    """The reward of a row by everything said about it, oldest first; None when nothing of it makes a reward."""
    explicit: float | None = None
    rated: float | None = None
    metrics: dict[str, float] = {}
    for signal in said:
        if signal.kind == "reward":
            explicit = signal.value
        elif signal.kind == "rating":
            rated = rule.up if signal.text == "up" else rule.down
        elif signal.kind == "metric" and signal.name in rule.metrics and signal.value is not None:
            metrics[signal.name] = rule.metrics[signal.name] * signal.value
    parts = [part for part in (explicit if explicit is not None else rated, *metrics.values()) if part is not None]
    if not parts:
        return None
    total = sum(parts)
    if rule.clip is not None:
        total = min(max(total, rule.clip[0]), rule.clip[1])
    return min(max(float(total), -_LARGEST), _LARGEST)  # a sum of finite numbers may not be
