"""The report of learn: what the runs earned, what became of the model, and what failed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flywheel.journal import read_lines
from flywheel.page import page


@dataclass(frozen=True)
class Evaluation:
    """What one version earned on tasks, without being trained on them.

    >>> Evaluation(version=3, n=2, mean=0.5, standard_error=0.5, solved=0.5, metrics={}).mean
    0.5
    """

    version: int | None
    n: int  # runs that gave a reward
    mean: float
    standard_error: float
    solved: float  # the share of tasks of which at least one run earned 1 or more: pass@k for k runs a task
    metrics: dict[str, float]
    failed: int = 0
    failures: dict[str, int] = field(default_factory=dict)  # runs that gave no reward, by cause
    after_runs: int | None = None  # of learn, that had ended before it
    rewards: dict[str, float] = field(default_factory=dict, repr=False)  # the mean of each task, by its digest

    @property
    def main_failure(self) -> str | None:
        """The most frequent cause of runs that gave no reward; None when all did."""
        return max(self.failures, key=self.failures.__getitem__) if self.failures else None


@dataclass
class Report:
    """What learn did. reward_first and reward_last are means over the first and the last tenth of the rewarded runs.

    >>> Report(name="math", runs=10, rewarded=10, reward_first=0.1, reward_last=0.9).reward_last
    0.9
    """

    name: str
    runs: int = 0  # that ended, each counted once
    rewarded: int = 0
    reward_first: float | None = None
    reward_last: float | None = None
    dropped: int = 0  # that failed to the last retry
    failures: dict[str, int] = field(default_factory=dict)  # failed attempts, by cause
    version_first: int | None = None
    version_last: int | None = None
    evaluations: list[Evaluation] = field(default_factory=list)
    seconds: float = 0.0
    waited_s: float = 0.0  # in which nothing new was started, so that training keeps up
    stopped: str = "done"  # done | early | time | interrupted | failed: and why

    def write(self, folder: Path, journal: Path) -> None:
        """report.json, report.html, and episodes.jsonl with a line for each run."""
        plain = asdict(self)
        (folder / "report.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
        rewards = []
        with (folder / "episodes.jsonl").open("w", encoding="utf-8") as file:
            for episode in episodes(journal):
                file.write(json.dumps(episode, ensure_ascii=False) + "\n")
                if episode["reward"] is not None:
                    rewards.append(episode["reward"])
        (folder / "report.html").write_text(page(self, rewards), encoding="utf-8")


def episodes(journal: Path) -> Iterator[dict[str, Any]]:
    """The runs of a journal, each once, in the order in which they ended. Reads it twice and holds only places."""
    last: dict[str, int] = {}
    for number, line in enumerate(read_lines(journal)):
        if line["kind"] == "ended":
            last[line["place"]] = number
        elif line["kind"] == "void":
            last.pop(line["place"], None)
    for number, line in enumerate(read_lines(journal)):
        if line["kind"] == "ended" and last.get(line["place"]) == number:
            yield {name: value for name, value in line.items() if name not in ("kind", "feedback")}


def summarize(report: Report, journal: Path, failures: Counter[str]) -> Report:
    """Fill in what the journal knows, over all starts."""
    outcomes: Counter[str] = Counter()
    rewards = []
    for episode in episodes(journal):
        outcomes[episode["outcome"]] += 1
        if episode["reward"] is not None:
            rewards.append(episode["reward"])
    tenth = max(1, len(rewards) // 10)
    report.runs, report.rewarded = sum(outcomes.values()), len(rewards)
    report.dropped, report.failures = outcomes["dropped"], dict(failures)
    if rewards:
        report.reward_first = sum(rewards[:tenth]) / tenth
        report.reward_last = sum(rewards[-tenth:]) / tenth
    return report
