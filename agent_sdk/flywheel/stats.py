"""Stats: what a TrainingRunner counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from flywheel.selection import Selected


@dataclass
class Stats:
    """Counters of a TrainingRunner, which can be read at any time.

    Each run is counted once: as rewarded, unrewarded or unsafe, or in failed by its error's type or as "stopped". The
    counts of "watch", "select" and "commit" in failed are not runs.

    >>> Stats(rewarded=2, reward_sum=1.0).reward_mean
    0.5
    """

    seen: int = 0  # production calls
    selected: int = 0
    dropped: int = 0  # selected, but not replayed: the queue was full, or stop did not wait longer
    undecided: int = 0  # neither selected nor rejected by a function as strategy, for the same reasons
    runs: int = 0  # ended shadow runs
    rewarded: int = 0
    unrewarded: int = 0  # the reward function returned no number: nothing, or metrics of weights that it does not know
    unsafe: int = 0  # ended at a tool; not trained on
    failed: Counter[str] = field(default_factory=Counter)
    commits: int = 0
    committed: int = 0  # recorded replies of its own runs with feedback that were committed
    reward_sum: float = 0.0
    last_error: str | None = None

    def lose(self, selected: Selected | None) -> None:
        """Count a call that will not be replayed, though it is selected or not decided yet."""
        self.dropped += selected is not None
        self.undecided += selected is None

    @property
    def reward_mean(self) -> float | None:
        """The mean reward of the rewarded runs."""
        return self.reward_sum / self.rewarded if self.rewarded else None
