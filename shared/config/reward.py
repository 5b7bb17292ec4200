"""Section `reward`: how signals become a reward."""

from __future__ import annotations

from pydantic import Field, model_validator

from shared.config.base import Bounds, Finite, Section, require_ascending


class RewardConfig(Section):
    """How signals become a reward. Signals are stored raw; `flywheel rewards` applies a changed rule to stored rows."""

    up: Finite = 1.0
    """The reward for the rating "up". An explicit reward takes precedence over a rating."""
    down: Finite = 0.0
    """The reward for the rating "down"."""
    metrics: dict[str, Finite] = Field(default_factory=dict)
    """Weight of each metric in the sum, by its name; other metrics are stored and ignored."""
    clip: Bounds | None = None
    """Lowest and highest reward of a row; null: unbounded."""
    accept: Bounds | None = (-100.0, 100.0)
    """Lowest and highest reward that a caller may send; others are answered with 400, and so are, if `clip` is null,
    metrics whose weighted value is outside this range. null: any finite number. Set the range of your rewards: one far
    outside it outweighs all others of its batch."""

    @model_validator(mode="after")
    def _check_bounds(self) -> RewardConfig:
        require_ascending("reward.clip", self.clip)
        require_ascending("reward.accept", self.accept)
        return self
