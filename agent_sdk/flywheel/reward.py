"""The return values of reward functions, and their conversion."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flywheel.errors import ConfigError
from flywheel.wire import to_number

_MAX_COMMENT_BYTES = 64 * 1024  # of the explorer


@dataclass(frozen=True)
class Reward:
    """A return value for reward functions: a number, its parts, a comment. value None: only metrics.

    shown: with value None, the reward in reports, evaluations and stats, where the explorer makes it from the metrics.
    It is not sent.

    >>> Reward(0.8, {"steps": 4}).value
    0.8
    """

    value: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    comment: str | None = None
    shown: float | None = field(default=None, repr=False, compare=False)

    @property
    def figure(self) -> float | None:
        """The reward in reports, evaluations and stats."""
        return self.shown if self.value is None else self.value


def read_reward(result: object, where: str = "the reward function") -> Reward | None:
    """Convert a reward function's result to a Reward; None if it gave nothing. Raises ConfigError naming `where`.

    A number or a truth value is the reward. A mapping has it under "reward", next to metrics; or it contains named
    parts whose sum is the reward.

    >>> read_reward({"reward": 1, "steps": 4})
    Reward(value=1.0, metrics={'steps': 4.0}, comment=None)
    >>> read_reward({"correctness": 1.0, "format": 0.5}).value
    1.5
    """
    if result is None:
        return None
    if isinstance(result, Reward):
        parts = {name: _number(value, f"{where}, {name}") for name, value in result.metrics.items()}
        value, shown = (None if one is None else _number(one, where) for one in (result.value, result.shown))
        found = Reward(value, parts, result.comment, shown)
    elif isinstance(result, Mapping):
        found = _read_mapping(result, where)
    else:
        found = Reward(_number(result, where))
    for name, value in {"reward": found.figure, **found.metrics}.items():
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"{where} gave {name}={value}: a reward is a finite number, or None for none")
    return None if found == Reward(None) else found


def _read_mapping(result: Mapping[Any, Any], where: str) -> Reward:
    parts = {str(name): value for name, value in result.items() if name not in ("reward", "metrics", "comment")}
    parts.update(result.get("metrics") or {})
    metrics = {name: _number(value, f"{where}, {name}") for name, value in parts.items()}
    if "reward" not in result:
        return Reward(math.fsum(metrics.values()), metrics, result.get("comment"))
    value = result["reward"]
    return Reward(None if value is None else _number(value, where), metrics, result.get("comment"))


def cut_comment(comment: str | None) -> str | None:
    """Return what the explorer accepts of a comment: it may be the output of a tool, of any length."""
    if not isinstance(comment, str) or len(comment) * 4 <= _MAX_COMMENT_BYTES:
        return comment
    return comment.encode("utf-8", "replace")[:_MAX_COMMENT_BYTES].decode("utf-8", "ignore")


def _number(value: object, where: str) -> float:
    number = to_number(value)  # leaves texts: an answer such as "42" is no reward
    if isinstance(number, (int, float)):
        return float(number)
    raise ConfigError(f"{where} gave {value!r}: return a number, a mapping of numbers, a Reward or None")
