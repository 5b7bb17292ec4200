"""The report of learn: the rewards of the runs, the versions of the model, and the failures."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flywheel.journal import read_lines
from flywheel.page import page

log = logging.getLogger("flywheel")


@dataclass(frozen=True)
class Evaluation:
    """The rewards of one version on tasks, without training on them.

    >>> Evaluation(version=3, n=2, mean=0.5, standard_error=0.5, solved=0.5, metrics={}).mean
    0.5
    """

    version: int | None
    n: int  # number of runs with a reward
    mean: float
    standard_error: float  # of the mean; the runs of a task are a cluster
    solved: float  # share of tasks on which at least one run got 1 or more: pass@k with k runs a task
    metrics: dict[str, float]
    failed: int = 0
    failures: dict[str, int] = field(default_factory=dict)  # runs without a reward, by cause
    after_runs: int | None = None  # number of runs of learn before it
    rewards: dict[str, float] = field(default_factory=dict, repr=False)  # mean of each task, by its digest

    @property
    def main_failure(self) -> str | None:
        """The most frequent cause of runs without a reward; None if all have one."""
        return max(self.failures, key=self.failures.__getitem__) if self.failures else None


@dataclass
class Report:
    """The result of learn. reward_first and reward_last are means over the first and last tenth of the rewarded runs.

    The counts, the rewards and the evaluations are over all starts in the folder; the versions, the times and the end
    are those of the last start.

    >>> Report(name="math", runs=10, rewarded=10, reward_first=0.1, reward_last=0.9).reward_last
    0.9
    """

    name: str
    runs: int = 0  # ended runs, each counted once
    rewarded: int = 0
    reward_first: float | None = None
    reward_last: float | None = None
    dropped: int = 0  # runs whose last attempt failed
    failures: dict[str, int] = field(default_factory=dict)  # failed attempts, by cause
    version_first: int | None = None
    version_last: int | None = None
    evaluations: list[Evaluation] = field(default_factory=list)
    seconds: float = 0.0
    waited_s: float = 0.0  # time without starts, so that training keeps up
    stopped: str = "done"  # reason of the end: done | early | time | versions | interrupted | failed: error

    def write(self, folder: Path, journal: Path) -> None:
        """Write report.json, report.html, and episodes.jsonl with a line for each run."""
        plain = asdict(self)
        (folder / "report.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
        rewards = []
        with (folder / "episodes.jsonl").open("w", encoding="utf-8") as file:
            for episode in episodes(journal):
                file.write(json.dumps(episode, ensure_ascii=False) + "\n")
                if episode["reward"] is not None:
                    rewards.append(episode["reward"])
        (folder / "report.html").write_text(page(self, rewards), encoding="utf-8", errors="replace")


def episodes(journal: Path) -> Iterator[dict[str, Any]]:
    """Yield the runs of a journal, each once, in the order of their ends. Reads it twice to store only places."""
    last: dict[str, int] = {}
    for number, line in enumerate(read_lines(journal)):
        if line["kind"] == "ended":
            last[line["place"]] = number
        elif line["kind"] == "void":
            last.pop(line["place"], None)
    for number, line in enumerate(read_lines(journal)):
        if line["kind"] == "ended" and last.get(line["place"]) == number:
            yield {name: value for name, value in line.items() if name not in ("kind", "feedback")}


def summarize(report: Report, journal: Path) -> Report:
    """Fill in the totals of the journal, over all starts. Warns if no run was rewarded."""
    outcomes: Counter[str] = Counter()
    rewards = []
    for episode in episodes(journal):
        outcomes[episode["outcome"]] += 1
        if episode["reward"] is not None:
            rewards.append(episode["reward"])
    tenth = max(1, len(rewards) // 10)
    report.runs, report.rewarded = sum(outcomes.values()), len(rewards)
    report.dropped = outcomes["dropped"]
    report.failures = dict(Counter(line["cause"] for line in read_lines(journal) if line["kind"] == "failed"))
    if outcomes and not (rewards or outcomes["rewarded"]):
        failed = f"attempts failed by {report.failures}" if report.failures else "the workflow or judge gave none"
        log.warning("none of the %d runs was rewarded, so nothing is learned from them: %s", report.runs, failed)
    if rewards:
        report.reward_first = sum(rewards[:tenth]) / tenth
        report.reward_last = sum(rewards[-tenth:]) / tenth
    return report
