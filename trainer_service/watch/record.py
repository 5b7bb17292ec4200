"""One update's figures, and the interface of their outputs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from shared.experience import Experience
from shared.ledger.queries import Rewards

_SHOWN = ("rows", "reward_mean", "kl_to_reference", "clip_fraction", "grad_norm", "logprob_gap_max", "seconds")


@dataclass(slots=True)
class Record:
    """The measurements of one update, from claim to publish."""

    step: int  # number of updates done
    version: int  # the last published version
    at: float  # Unix seconds
    figures: dict[str, float]  # means over tokens unless named otherwise
    seconds: dict[str, float] = field(default_factory=dict)  # by stage
    signals: dict[str, int] = field(default_factory=dict)  # rows by kind of signal, without rehearsed rows
    rewards: list[Rewards] = field(default_factory=list)  # by sampling version, oldest first

    @classmethod
    def of(
        cls,
        rows: Iterable[Experience],
        stats: Mapping[str, float],
        costs: Mapping[str, float],
        rewards: list[Rewards],
        *,
        corrupt: int = 0,
        **about: int,
    ) -> Record:
        """rows: the claimed rows. corrupt: number of damaged rows besides. costs: see Updater.costs.

        about: step and version.
        """
        figures = {name: value for name, value in stats.items() if name != "seconds"}
        tokens, computed = costs["tokens_in"], costs["tokens_computed"]
        figures |= {"tokens_in": tokens, "tokens_computed": computed, "rows_quarantined": float(corrupt)}
        if tokens:
            figures |= {"tokens_folded": 1 - computed / tokens, "tokens_per_s": tokens / costs["train_seconds"]}
        return cls(
            **about,
            at=time.time(),
            figures=figures,
            seconds={"precompute": costs["precompute_seconds"], "train": costs["train_seconds"]},
            signals=count_signals(row for row in rows if not row.is_rehearsal),
            rewards=rewards,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the line for figures.jsonl."""
        whole = {"step": self.step, "version": self.version, "at": self.at, **self.figures}
        by_version = {str(rewards.version): rewards.mean for rewards in self.rewards}
        return whole | {"seconds": self.seconds, "signals": self.signals, "reward_by_version": by_version}

    def flat(self) -> dict[str, float]:
        """Return the figures with one flat name each, for trackers that plot curves over steps."""
        flat = dict(self.figures)
        flat |= {f"seconds/{stage}": value for stage, value in self.seconds.items()}
        flat |= {f"signals/{kind}": float(count) for kind, count in self.signals.items()}
        if self.rewards:
            flat["reward_newest_version"] = self.rewards[-1].mean
        return flat


class Sink(Protocol):
    """An output for records that may fail or block. Its errors are logged and do not stop training."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


def count_signals(rows: Iterable[Experience]) -> dict[str, int]:
    """Count rows by kind of signal; a row with several kinds counts for each."""
    return dict(Counter(kind for row in rows for kind in sorted({signal.kind for signal in row.signals})))


def shown(stats: Mapping[str, float]) -> dict[str, object]:
    """Return the figures for the log; with several algorithms, names start with the algorithm and a slash."""
    names = [name for name in stats if name.rpartition("/")[2] in _SHOWN or name.startswith("unused/")]
    return {name: float(f"{stats[name]:.4g}") for name in names}
