"""The interface of an algorithm. It sees arrays and tensors: no DeepSpeed, no SQL, no files, no ranks.

The trainer processes a batch in these steps:

1. `units`      each algorithm selects the sequences that it trains on, and those that it needs together
2. precompute   one forward pass of each model that an algorithm needs; the ranks exchange the results
3. `constants`  on the whole batch, equal on every rank: advantages, weights, baselines
4. step         for each minibatch, packed into micro-batches that split no unit: Σ weight · `loss` / `size`

Shapes: A actions (sampled tokens) of one sequence, K actions of a micro-batch, S sequences of a micro-batch. A sequence
counts once for each unit that names it.
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
Flags = npt.NDArray[np.bool_]
Figures = dict[str, float]  # for logs and plots
Memory = dict[str, Any]  # JSON: trackers, running means; saved with the trainer's state, equal on every rank
Constants = dict[str, list[npt.NDArray[Any]]]
"""By name: one array for each member of the units, in their order; [A], or [1] for a value of a whole sequence.

For a member with words, A stands for the B actions that they are about: its loss is of these alone, so that a sequence
whose turns all have words is not repeated for each. `others` is [A, N], of int64: further tokens at each action that
the loss scores under the policy. All other arrays are of float32.
"""


class Needs(Flag):
    """What is computed for an algorithm."""

    NOTHING = 0
    PROXIMAL = auto()  # log π of the weights at the start of the batch: plain, and as the sampler processes it
    REFERENCE = auto()  # log π of the base model
    VALUES = auto()  # the critic's V before each action, at the start and under the trained weights
    TEACHER = auto()  # log π of the same actions by a teacher, after the words of the units if they have any
    ENTROPY = auto()  # entropy with its gradient, for the loss; without this, entropy is only plotted


class Said(Enum):
    """The kind of signal that a unit learns from. The unit's gradient counts for the key that sent it (shares.py)."""

    SCORE = auto()  # signals that make up the reward of a trajectory
    RATING = auto()
    ANSWER = auto()  # a correction or a demonstration
    PREFERENCE = auto()


Speakers = dict[tuple[Said, tuple[int, ...]], str | None]
"""The key that sent a signal about these places; None: without a key."""


@dataclass(frozen=True, slots=True)
class Words:
    """Words about one turn of a sequence, as a block of tokens; a model that reads it becomes a teacher."""

    token_ids: Ints  # placed before the sequence's own tokens
    actions: Ints  # [B] the turn's actions, as indices into the sequence's; no two words of a sequence share one
    reward: float | None = None  # of the turn, or else of the whole
    key: str | None = None  # key that wrote the last of them


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of a batch, and the signals about them. A place is an index into `sequences`."""

    sequences: list[TokenSequence]  # those of trajectories, then others, such as single turns or corrections
    trajectories: list[Trajectory]  # credit of the sampled sequences
    members: list[list[int]]  # places of each trajectory's sequences
    written: Sequence[int] = ()  # places of written answers: corrections, demonstrations
    pairs: list[tuple[int, int]] = field(default_factory=list)  # places: the preferred sequence, the other one
    ratings: dict[int, bool] = field(default_factory=dict)  # by place: True for thumbs up
    words: dict[int, list[Words]] = field(default_factory=dict)  # by place: the words about its turns
    taught: dict[int, Floats] = field(default_factory=dict)  # by place [A]: a remote teacher's log p; NaN: none
    rehearsed: Sequence[int] = ()  # places of sequences that were trained on before and do not count as new
    said_by: Speakers = field(default_factory=dict)  # of ratings, answers and preferences
    unused: Figures = field(default_factory=dict)  # number of signals that cannot be learned from, by reason

    @classmethod
    def of(cls, trajectories: Iterable[Trajectory]) -> Batch:
        """Build a batch of trajectories, with no signals but their rewards."""
        batch = cls([], list(trajectories), [])
        for trajectory in batch.trajectories:
            batch.members.append([batch.add(sequence) for sequence in trajectory.sequences])
        return batch

    @property
    def rewarded(self) -> list[int]:
        """Places of the sequences of trajectories with a reward, for one turn or for the whole."""
        given = [[t.outcome, *t.turn_rewards] for t in self.trajectories]
        return [
            place
            for rewards, places in zip(given, self.members, strict=True)
            if any(reward is not None for reward in rewards)
            for place in places
        ]

    @property
    def rewards(self) -> list[float]:
        """All rewards, each once: the outcomes of trajectories, and the rewards of single turns."""
        return [float(r) for t in self.trajectories for r in (t.outcome, *t.turn_rewards) if r is not None]

    @property
    def scored_by(self) -> dict[int, str | None]:
        """The key that set the reward of each trajectory's sequences, by place."""
        return {
            place: trajectory.key
            for trajectory, places in zip(self.trajectories, self.members, strict=True)
            for place in places
        }

    def add(self, sequence: TokenSequence) -> int:
        """Add a sequence, for example one of a prompt and another sequence's reply. Returns its place."""
        self.sequences.append(sequence)
        return len(self.sequences) - 1


@dataclass(frozen=True, slots=True)
class Unit:
    """Sequences whose losses need each other: one micro-batch contains all of them."""

    members: tuple[int, ...]  # places in the batch
    words: tuple[Words, ...] = ()  # for Needs.TEACHER: one for each member, or none
    trained: bool = True  # False: only precomputed
    said: Said | None = None  # what it learns from; None: its words, or no signal


@dataclass(frozen=True, slots=True)
class Precomputed:
    """Scores by the models before the first step. Arrays that no algorithm needs are empty."""

    proximal: list[Floats]  # of each sequence [A]: log π_prox at the sampling temperature
    processed: list[Floats]  # of each sequence [A]: log π_prox as the engine's sampler processes it
    reference: list[Floats]  # of each sequence [A]: log π_ref at the sampling temperature
    values: list[Floats]  # of each sequence [A]: the critic's
    # of each member of the units, at the sampling temperature: [B] of its words, else [A]
    teacher: list[Floats] = field(default_factory=list)
    top: list[Ints] = field(default_factory=list)  # of each member [B, N]: the teacher's most likely tokens
    top_logprobs: list[Floats] = field(default_factory=list)  # [B, N]: the teacher's log π of these


@dataclass(frozen=True, slots=True)
class Now:
    """The units of a micro-batch under the trained weights: one after another, with their members in order.

    Of a member with words, these are the actions that they are about.
    """

    logprobs_K: Tensor  # at the sampling temperature
    entropy_K: Tensor  # nats
    values_K: Tensor | None  # None without Needs.VALUES
    sequence_K: Tensor  # index of each action's sequence among the S
    unit_S: Tensor  # index of each sequence's unit
    others_KN: Tensor | None = None  # log π of the tokens in the part's constant `others`

    def sum_S(self, x_K: Tensor) -> Tensor:
        """Sum over the actions of each sequence: [S]."""
        return x_K.new_zeros(len(self.unit_S)).index_add(0, self.sequence_K, x_K)

    def only(self, chosen_K: Tensor) -> Now:
        """Return the same for these actions alone."""
        return replace(
            self,
            logprobs_K=self.logprobs_K[chosen_K],
            entropy_K=self.entropy_K[chosen_K],
            values_K=None if self.values_K is None else self.values_K[chosen_K],
            sequence_K=self.sequence_K[chosen_K],
            others_KN=None if self.others_KN is None else self.others_KN[chosen_K],
        )


class Algorithm(Protocol):
    """One algorithm with its settings. The object is immutable: state between batches belongs in its memory.

    Its settings (shared/config/algorithms.py) define which signals it learns from and what must be claimed together,
    because explorers need that and do not import PyTorch.
    """

    @property
    def needs(self) -> Needs: ...

    def units(self, batch: Batch) -> list[Unit]:
        """Return the units of this batch to learn from. It may add sequences to the batch."""

    def constants(
        self, batch: Batch, units: list[Unit], precomputed: Precomputed, memory: Memory
    ) -> tuple[Constants, Figures]:
        """Return the constants of the loss for the whole batch. It may change its memory.

        `weights` multiply each member's part of the loss, and may be reduced before the first step; `size` does not
        depend on them. The slope of the loss apart from them is in `advantages`, `shares` or `slopes`, [A] each.
        """

    def size(self, units: list[Unit], constants: Constants) -> float:
        """Return the divisor of a minibatch's loss: the number of tokens, sequences or pairs in these units."""

    def loss(self, now: Now, constants: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a sum over the micro-batch, to be minimized, and sums to plot, which are divided by the size, too.

        constants: of the micro-batch's units, by name: [K], or [S] for values of whole sequences; without `others`,
        whose scores are in `now`.
        """


def one_each(places: Iterable[int], said: Said | None = None) -> list[Unit]:
    """Return a unit for each of these sequences, for losses without dependencies. said: what they learn from."""
    return [Unit((place,), said=said) for place in places]


def pick(items: Sequence[T], units: list[Unit]) -> list[T]:
    """From items of all sequences of the batch, return those of the units' members."""
    return [items[place] for unit in units for place in unit.members]
