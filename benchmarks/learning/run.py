"""One run: customers give feedback on what the policy sampled, and the trainer's own code learns from it.

Each version samples a number of replies. Some of them get feedback, at once or versions later; only these are recorded,
in a ledger, by the transitions that chats, feedback and commits use. Some others are sampled to measure a version's
reward, and the rest is only counted. The claim, the preparations and the update are the trainer's. No version is
written: the policy is sampled in memory.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.learning.world import HINT, Reply, World, worth
from services.trainer import build_update, preparations
from shared.config import Config, RewardConfig
from shared.experience import Sample, Sampling
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.reward import Signal
from shared.stop_request import StopRequest
from shared.versions import version_path
from trainer_service.answers import answer_tokenizer
from trainer_service.base_version import ensure_base_version
from trainer_service.claim import Claimer
from trainer_service.learner import Learner
from trainer_service.ranks import join_ranks

Say = Callable[[list[Reply], random.Random], list[tuple[list[Signal], str | None]]]
"""The feedback on replies, one for each: the signals, and the key that gives them."""
Said = tuple[str, list[Signal], str | None]
"""The feedback on one reply, by its name."""
MEASURED = 200  # replies of a version; their mean worth is its reward


@dataclass(frozen=True, slots=True)
class Plan:
    """One case."""

    trainer: dict[str, Any]
    say: Say
    share: float = 0.1  # of the replies that get feedback
    late: tuple[int, int] = (0, 4)  # delay of the feedback in versions: from, to
    versions: int = 120
    rows: int = 16  # in an update
    departments: tuple[str, ...] | None = None  # None: the world's
    runs: int = 1  # of each task; their feedback arrives together. 1: chats that name no task
    turns: int = 1  # of a run: tickets of one customer, each in its own chat

    @property
    def attempts(self) -> int:
        """Replies at one task."""
        return self.runs * self.turns

    def names(self, version: int, place: int) -> dict[str, str]:
        """The task and the run of one of a version's replies, as fields of a sample; none without tasks."""
        if self.attempts == 1:
            return {}
        return {"task_id": f"t{version}-{place // self.attempts}", "run_id": f"r{place // self.turns}"}


@dataclass(slots=True)
class Curve:
    """What a run measured."""

    rewards: list[float] = field(default_factory=list)  # of each version: its mean worth
    per_version: int = 0  # replies
    seconds: float = 0.0
    last: dict[str, float] = field(default_factory=dict)  # figures of the last update
    after: dict[str, float] = field(default_factory=dict)  # other figures, measured at the end


class Contestant(Protocol):
    """The learner: our trainer, or a peer in its place."""

    @property
    def policy(self) -> Any:
        """The module that is sampled."""

    def record(self, names: list[str], replies: list[Reply], version: int) -> None:
        """Store replies that will get feedback."""

    def hear(self, said: list[Said]) -> bool:
        """Receive feedback. Returns whether there is something to learn from."""

    def update(self, version: int) -> dict[str, float]:
        """Learn from an update's rows. Returns figures."""


@dataclass(frozen=True, slots=True)
class Desk:
    """The parts of a trainer, in this process."""

    config: Config
    plan: Plan
    ledger: Ledger
    learner: Learner
    claimer: Claimer

    @property
    def policy(self) -> Any:
        return self.learner.policy

    def record(self, names: list[str], replies: list[Reply], version: int) -> None:
        samples = [
            replace(_sample(*one, version), **self.plan.names(version, place))
            for place, one in enumerate(zip(names, replies, strict=True))
        ]
        with self.ledger.write() as connection:
            transitions.record(connection, samples)

    def hear(self, said: list[Said]) -> bool:
        """Apply feedback and commit."""
        about: dict[str, Any] = {"task_id": None, "run_id": None, "rule": RewardConfig()}
        with self.ledger.write() as connection:
            for name, signals, key in said:
                transitions.apply_feedback(
                    connection, msg_ids=[name], signals=signals, key_name=key,
                    learned=self.config.trainer.learns_from, **about,
                )  # fmt: skip
            return transitions.commit(connection)[1] > 0

    def update(self, version: int) -> dict[str, float]:
        """Train on one batch, claimed as the trainer's loop does, and publish the next version's number."""
        self.claimer.search_anew()
        lease = self.claimer.next()
        assert lease is not None
        stats = self.learner.train(self.learner.prepare(lease.rows), step=version, version=version)
        about: dict[str, Any] = {"version": version + 1, "parent": version, "kind": "full", "step": version + 1}
        with self.ledger.write() as connection:
            transitions.publish(connection, trainer=self.config.trainer.name, batch_ids=[lease.batch_id], **about)
        return {name: float(f"{value:.4g}") for name, value in stats.items()}


@contextlib.contextmanager
def open_desk(base: Path, plan: Plan, seed: int) -> Iterator[Desk]:
    """A trainer on a new root folder."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"learning_rate": 3e-4, "epochs": 2, "minibatches": 4, "seed": seed, **plan.trainer}
        named = settings.get("algorithms") or {settings["algorithm"]: 1.0}
        if "hint" in named:
            settings["hint"] = {**HINT, **settings.get("hint", {})}
        settings |= {"batch_size": plan.rows, "batch_timeout_s": 1e-3, "poll_interval_s": 5e-3, "cpu_threads": 1}
        about = {"root_dir": folder, "model": {"path": str(base)}, "trainer": settings}
        config = Config.model_validate(about)
        with contextlib.closing(Ledger.open(config.ledger_url)) as ledger:
            ensure_base_version(config, ledger)
            torch.manual_seed(seed)
            ranks, start, stop = join_ranks(60), config.root / version_path(0), StopRequest()
            learner = Learner(partial(build_update, config, start, ranks), ranks, None, preparations(config, stop))
            known = {"vocabulary": learner.vocabulary, "context": learner.context}
            answers = answer_tokenizer(config.trainer, start, **known)
            claimer = Claimer(ledger, config.trainer, stop, learner.vocabulary, answers)
            yield Desk(config, plan, ledger, learner, claimer)
            learner.close()


def learn(contestant: Contestant, world: World, plan: Plan, seed: int, first: int = 0) -> Curve:
    """Run the versions of a case, by a contestant that has published `first` of them."""
    started, draw, curve = time.perf_counter(), random.Random(f"{seed} {first}"), Curve()
    curve.per_version = round(plan.rows / plan.share)
    sampled = min(curve.per_version, max(plan.rows, MEASURED))  # the others get no feedback
    waiting: dict[int, list[Said]] = defaultdict(list)
    for version in range(first, first + plan.versions):
        replies = world.sample(contestant.policy, draw, sampled, plan.runs, plan.turns)
        curve.rewards.append(sum(map(worth, replies)) / len(replies))
        chosen = replies[: plan.rows]
        names = [f"m{version}-{number}" for number in range(len(chosen))]
        contestant.record(names, chosen, version)
        for place, (name, (signals, key)) in enumerate(zip(names, plan.say(chosen, draw), strict=True)):
            if place % plan.attempts == 0:
                heard = version + draw.randint(*plan.late)
            waiting[heard].append((name, signals, key))
        if contestant.hear(waiting.pop(version, [])):
            curve.last = contestant.update(version)
    curve.seconds = time.perf_counter() - started
    return curve


def _sample(name: str, reply: Reply, version: int) -> Sample:
    return Sample(name, 0, version, version, reply.tokens, Sampling(), "stop", time.time(), 0.01)
