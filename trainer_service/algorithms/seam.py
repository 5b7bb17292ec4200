"""What an algorithm is. It sees arrays and tensors: no DeepSpeed, no SQL, no files, no ranks.

The trainer takes a batch through these steps:

1. `units`      each algorithm says which sequences it trains on, and which of them it needs together
2. precompute   one forward pass of each model that an algorithm needs; what the ranks computed is gathered
3. `constants`  on the whole batch, the same on every rank: advantages, weights, baselines
4. step         for each minibatch, packed into micro-batches that part no unit: Σ weight · `loss` / `size`

Shapes: A actions (sampled tokens) of one sequence, K actions of a micro-batch, S sequences of a micro-batch. A sequence
counts as often as units name it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, Flag, auto
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trainer_service.trajectories import TokenSequence, Trajectory

T = TypeVar("T")
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Figures = dict[str, float]  # for logs and plots
Memory = dict[str, Any]  # JSON: trackers, running means; saved with the trainer's state, the same on every rank
Constants = dict[str, list[Floats]]
"""By name: one array for each member of the units, in their order; [A], or [1] for what belongs to a whole sequence.

`others` is [A, N], of int64: tokens in the place of each action that the loss asks the policy about, too.
"""


class Needs(Flag):
    """What is computed for an algorithm."""

    NOTHING = 0
    PROXIMAL = auto()  # log π of the weights that the batch begins with: plain, and as the sampler processes it
    REFERENCE = auto()  # log π of the base model
    VALUES = auto()  # the critic's V before each action, then and under the weights that are trained
    TEACHER = auto()  # log π of the same actions by a teacher, behind the words of the units where they have some
    ENTROPY = auto()  # in the loss: entropy with its gradient; without this it is for plots alone


class Said(Enum):
    """What somebody said that a unit learns from. Whoever said it answers for the unit's gradient (shares.py)."""

    SCORE = auto()  # what makes the reward of a trajectory
    RATING = auto()
    ANSWER = auto()  # a correction or a demonstration
    PREFERENCE = auto()


Speakers = dict[tuple[Said, tuple[int, ...]], str | None]
"""The key that said something of these places; None: without a key."""


@dataclass(frozen=True, slots=True)
class Words:
    """What was said of one turn of a sequence, as a block of tokens that makes a teacher of whoever has read it."""

    token_ids: Ints  # to stand before the sequence's own
    actions: Ints  # [B] which of the sequence's actions are the turn's
    reward: float | None = None  # the turn's, or else that of the whole
    key: str | None = None  # that said the last of it


@dataclass(frozen=True, slots=True)
class Batch:
    """What the rows say."""

    sequences: list[TokenSequence]  # those of trajectories, then others, such as turns of these alone, or corrections
    trajectories: list[Trajectory]  # the credit of what was sampled
    members: list[list[int]]  # of each trajectory: its sequences, by their places in `sequences`
    written: Sequence[int] = ()  # places of what people wrote: corrections, demonstrations
    pairs: list[tuple[int, int]] = field(default_factory=list)  # places: of the preferred one, of the other
    ratings: dict[int, bool] = field(default_factory=dict)  # by place: thumbs up
    words: dict[int, list[Words]] = field(default_factory=dict)  # by place: for each turn that was spoken of
    taught: dict[int, Floats] = field(default_factory=dict)  # by place [A]: a remote teacher's log p; NaN: it gave none
    rehearsed: Sequence[int] = ()  # places of what was trained on before and is not counted as new
    said_by: Speakers = field(default_factory=dict)  # of ratings, answers and preferences
    unused: Figures = field(default_factory=dict)  # how much of what was said teaches nothing, by reason

    @classmethod
    def of(cls, trajectories: Iterable[Trajectory]) -> Batch:
        """A batch of trajectories, with nothing but their rewards."""
        batch = cls([], list(trajectories), [])
        for trajectory in batch.trajectories:
            batch.members.append([batch.add(sequence) for sequence in trajectory.sequences])
        return batch

    @property
    def rewarded(self) -> list[int]:
        """The sequences of trajectories that have a reward, of one turn or of the whole."""
        given = [[t.outcome, *t.turn_rewards] for t in self.trajectories]
        return [
            place
            for rewards, places in zip(given, self.members, strict=True)
            if any(reward is not None for reward in rewards)
            for place in places
        ]

    @property
    def rewards(self) -> list[float]:
        """All that was said, once each: of trajectories their outcomes, and what is of single turns."""
        return [float(r) for t in self.trajectories for r in (t.outcome, *t.turn_rewards) if r is not None]

    @property
    def scored_by(self) -> dict[int, str | None]:
        """The key that set the reward of each trajectory's sequences."""
        return {
            place: trajectory.key
            for trajectory, places in zip(self.trajectories, self.members, strict=True)
            for place in places
        }

    def add(self, sequence: TokenSequence) -> int:
        """Add a sequence, such as one that an algorithm composed of a prompt and another's reply. Returns its place."""
        self.sequences.append(sequence)
        return len(self.sequences) - 1


@dataclass(frozen=True, slots=True)
class Unit:
    """Sequences whose losses need each other: they are trained on in one micro-batch."""

    members: tuple[int, ...]  # places in the batch
    words: tuple[Words, ...] = ()  # for Needs.TEACHER: one for each member, or none at all
    trained: bool = True  # False: only precomputed
    said: Said | None = None  # what it learns from; None: its words, or else nothing that anybody said


@dataclass(frozen=True, slots=True)
class Precomputed:
    """What the models said before the first step. Arrays that no algorithm needs are empty."""

    proximal: list[Floats]  # of each sequence [A]: log π_prox at the sampling temperature
    processed: list[Floats]  # of each sequence [A]: log π_prox as the engine's sampler processes it
    reference: list[Floats]  # of each sequence [A]: log π_ref at the sampling temperature
    values: list[Floats]  # of each sequence [A]: the critic's
    teacher: list[Floats]  # of each member of the units, at the sampling temperature: [B] of its words, else [A]
    top: list[Ints] = field(default_factory=list)  # of each member [B, N]: the teacher's likeliest tokens there
    top_logprobs: list[Floats] = field(default_factory=list)  # [B, N]: its log π of these


@dataclass(frozen=True, slots=True)
class Now:
    """The units of a micro-batch under the weights that are trained: one after another, with their members in order."""

    logprobs_K: Tensor  # at the sampling temperature
    entropy_K: Tensor  # nats
    values_K: Tensor | None  # None without Needs.VALUES
    sequence_K: Tensor  # which of the S sequences each action belongs to
    unit_S: Tensor  # which unit each sequence belongs to, from 0
    others_KN: Tensor | None = None  # log π of the tokens that the part's constants name as `others`

    def sum_S(self, x_K: Tensor) -> Tensor:
        """Sums over the actions of each sequence: [S]."""
        return x_K.new_zeros(len(self.unit_S)).index_add(0, self.sequence_K, x_K)

    def only(self, chosen_K: Tensor) -> Now:
        """The same with these actions alone."""
        return replace(
            self,
            logprobs_K=self.logprobs_K[chosen_K],
            entropy_K=self.entropy_K[chosen_K],
            values_K=None if self.values_K is None else self.values_K[chosen_K],
            sequence_K=self.sequence_K[chosen_K],
            others_KN=None if self.others_KN is None else self.others_KN[chosen_K],
        )


class Algorithm(Protocol):
    """One algorithm with its settings. It holds nothing that changes: what it must keep stands in its memory.

    Which signals it learns from, and what must be claimed together, stands with its settings
    (shared/config/algorithms.py): explorers ask for that, and they import no PyTorch.
    """

    @property
    def needs(self) -> Needs: ...

    def units(self, batch: Batch) -> list[Unit]:
        """What it learns from, of this batch. It may add sequences to the batch."""

    def constants(
        self, batch: Batch, units: list[Unit], precomputed: Precomputed, memory: Memory
    ) -> tuple[Constants, Figures]:
        """What the loss takes as constant, for the whole batch. It may change its memory.

        `weights` multiply what each member adds to the loss, and may be lowered before the first step; `size` does not
        depend on them. How steep the loss is beside them stands in `advantages`, `shares` or `slopes`, [A] each.
        """

    def size(self, units: list[Unit], constants: Constants) -> float:
        """What the loss of a minibatch is divided by: how many tokens, sequences or pairs these units have."""

    def loss(self, now: Now, constants: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """A sum over the micro-batch, to be minimized, and sums to plot, which are divided by the size, too.

        constants: those of the micro-batch's units, by name: [K], or [S] for what belongs to whole sequences.
        """


def one_each(places: Iterable[int], said: Said | None = None) -> list[Unit]:
    """A unit for each of these sequences: none needs another's loss. said: what they learn from."""
    return [Unit((place,), said=said) for place in places]


def pick(items: Sequence[T], units: list[Unit]) -> list[T]:
    """Of what there is one of for each sequence of the batch: that of the units' members."""
    return [items[place] for unit in units for place in unit.members]
