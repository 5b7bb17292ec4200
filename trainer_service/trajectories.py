"""Stage 6, batch: build trajectories from rows, and assign credit to their turns.

A trajectory is one run or one conversation. A turn is merged into an earlier sequence if its prompt begins with the
exact tokens of that sequence, so that T turns cost O(T); otherwise it starts a new sequence. Credit does not depend on
merging: it follows which turn each turn continues (credit.py), by the links between rows and by their tokens.

A sequence's rewards are the differences between its turns' returns: GAE with γ = 1 and V = 0 gives every turn its
return, in any sequence. A turn with an unknown return is left out of the trajectory, without a reward.

Shapes: T tokens of a sequence, A sampled tokens in it, N turns of a trajectory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.experience import Experience, Sampling, Tokens, TrajectoryKey, choice_name, trajectory_key
from shared.ledger.conditions import split_name
from shared.reward import SCORES, reward_key
from trainer_service.credit import Lineage
from trainer_service.sequence_index import SequenceIndex

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]

# Columns of TokenSequence.sampling: fields of Sampling.
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
)  # fmt: skip


@dataclass(slots=True)
class TokenSequence:
    """One token sequence and its actions: the tokens that were sampled."""

    token_ids: Ints  # [T]
    actions: Ints  # [A] positions in token_ids
    behaviour: Floats  # [A] logprobs of the sampler
    rewards: Floats  # [A] 0 except at the end of each turn
    versions: Ints  # [A] version that sampled the start of the action's turn
    crossed: Flags  # [A] whether another version sampled the end of the turn
    sampling: Floats  # [A, 7] temperature, top_p, top_k, min_p, repetition, presence and frequency penalty
    masked: Flags  # [A] whether the sampler forced or forbade tokens: the importance weight is then 1
    starts: Ints  # [A] start of the reply of the action's turn in token_ids; penalties count from there
    row_ids: list[int]
    ends: list[int]  # index of each turn's last action

    @property
    def token_actions(self) -> Ints:
        """The sampled tokens, [A]."""
        return self.token_ids[self.actions]


@dataclass(slots=True)
class Trajectory:
    """One run or conversation: its sequences and its rewards. Turns are in the order of their rows."""

    task_id: str | None
    sequences: list[TokenSequence] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)  # [N] index of each turn's sequence
    turn_rewards: list[float | None] = field(default_factory=list)  # [N]
    outcome: float | None = None  # of the newest turn that has an outcome
    lineage: Lineage = field(default_factory=lambda: Lineage([], [], []))  # which turn each turn continues
    unmerged: Counter[str] = field(default_factory=Counter)  # number of later turns that started a sequence, by reason
    key_group: str | None = None  # separates equal task ids of different groups of keys
    key: str | None = None  # key that scored the newest scored turn
    msg_id: str = ""  # id of its first message; without a task, its choices for one prompt are attempts of one group

    def turn_spans(self) -> Iterator[tuple[int, int, int]]:
        """For each turn: index of its sequence, its first action there, and the index after its last action."""
        ends = [iter(sequence.ends) for sequence in self.sequences]
        begins = [0] * len(ends)
        for number in self.turns:
            end = next(ends[number]) + 1
            yield number, begins[number], end
            begins[number] = end


def trajectories_of(rows: Iterable[Experience]) -> list[Trajectory]:
    """Return the trajectories of a batch, oldest first, with the rewards of their sequences.

    Rows whose rewards were trained on before form separate trajectories: they do not earn new rewards. So do rows with
    an unknown return, for which a return of 0 would mean that they are bad.
    """
    rows = sorted(rows, key=lambda row: row.id)
    building = _build(rows, frozenset())
    unknown = frozenset(row_id for builder in building for row_id in builder.unknown())
    return [builder.finish() for builder in (_build(rows, unknown) if unknown else building)]


def _build(rows: Iterable[Experience], unknown: Collection[int]) -> Collection[_Builder]:
    """Group rows into trajectories, in row order. unknown: ids of rows with an unknown return."""
    building: dict[tuple[TrajectoryKey, bool], _Builder] = {}
    for row in rows:
        key = trajectory_key(row), row.is_rewarded and row.id not in unknown
        (building.get(key) or building.setdefault(key, _Builder(row))).add(row)
    return building.values()


def sequence_of(row: Experience) -> TokenSequence:
    """Return a row as a sequence of one turn, without rewards."""
    n_prompt, n_reply = len(row.tokens.prompt_ids), len(row.tokens.reply_ids)
    sampling = np.array([getattr(row.sampling, name) for name in SAMPLING], np.float32)
    return TokenSequence(
        token_ids=np.concatenate([row.tokens.prompt_ids, row.tokens.reply_ids]).astype(np.int64),
        actions=np.arange(n_prompt, n_prompt + n_reply, dtype=np.int64),
        behaviour=row.tokens.logprobs.astype(np.float32),
        rewards=np.zeros(n_reply, np.float32),
        versions=np.full(n_reply, row.version, np.int64),
        crossed=np.full(n_reply, row.version_end not in (None, row.version)),
        sampling=np.tile(sampling, (n_reply, 1)),
        masked=np.full(n_reply, row.sampling.masked),
        starts=np.full(n_reply, n_prompt, np.int64),
        row_ids=[row.id],
        ends=[n_reply - 1],
    )


def sequence_alone(token_ids: npt.NDArray[Any], prompt: int, *, sampling: Sampling | None = None) -> TokenSequence:
    """Return a sequence that was not recorded: `prompt` tokens, then a reply with behaviour logprobs of -1."""
    ids = token_ids.astype(np.int32)
    tokens = Tokens(ids[:prompt], ids[prompt:], np.full(len(ids) - prompt, -1.0, np.float32))
    how = sampling or Sampling()
    return sequence_of(Experience(0, "alone", 0, None, None, None, "alone", 0, 0.0, 0.0, tokens, how))


class _Builder:
    """Builds a trajectory turn by turn."""

    def __init__(self, first: Experience) -> None:
        self._trajectory = Trajectory(first.task_id, key_group=first.key_group, msg_id=first.msg_id)
        self._index = SequenceIndex()
        self._row_ids: list[int] = []  # [N]
        self._turns: dict[str, int] = {}  # by the name of the turn's row
        self._parents: list[int | None] = []  # [N] the turn that each turn continues
        self._continued: set[int | None] = set()  # the turns that another one continues
        self._trees: list[int] = []  # [N] as the first turn of the tree
        self._trees_of: dict[str, int] = {}  # by message outside of the trajectory: the tree of what continues it
        self._last: list[int] = []  # the last turn of each sequence

    def add(self, row: Experience) -> None:
        """Append a turn to the sequence that its prompt begins with, or start a new sequence."""
        trajectory, turn, prompt_ids = self._trajectory, len(self._parents), row.tokens.prompt_ids
        number = self._index.take(prompt_ids)
        parent = self._parent(row, number)
        tree = self._tree(row, turn, parent)
        if number is None:
            number = len(trajectory.sequences)
            if turn:
                is_branch = parent is None or parent in self._continued
                trajectory.unmerged["apart" if tree == turn else "branch" if is_branch else "rewritten"] += 1
            trajectory.sequences.append(sequence_of(row))
            self._last.append(turn)
        else:
            _append(trajectory.sequences[number], row)
        self._index.add(number, turn, prompt_ids, trajectory.sequences[number].token_ids)
        self._last[number] = self._turns[choice_name(row.msg_id, row.choice)] = turn
        self._row_ids.append(row.id)
        self._parents.append(parent)
        self._continued.add(parent)
        self._trees.append(tree)
        trajectory.turns.append(number)
        trajectory.turn_rewards.append(row.own_reward)
        trajectory.outcome = trajectory.outcome if row.outcome is None else row.outcome
        if row.reward is not None and any(signal.kind in SCORES for signal in row.signals):
            trajectory.key = reward_key(row.signals)

    def _parent(self, row: Experience, number: int | None) -> int | None:
        """Return the turn that a row names as the one it continues, or whose tokens its prompt begins with.

        Of two, the later one, which continues the other: a history may be rewritten from some turn on, and a link may
        name an earlier turn if the caller changed a later reply. Of two with the same tokens, the one that it names.
        number: of the sequence that the row is merged into.
        """
        named, equal = self._turns.get(row.parent_id or ""), self._index.equal
        repeated = self._index.turns_in(row.tokens.prompt_ids)[-1:] if number is None else [self._last[number]]
        if named is not None and repeated and equal[named] == equal[repeated[0]]:
            return named
        return max([*repeated, *([] if named is None else [named])], default=None)

    def _tree(self, row: Experience, turn: int, parent: int | None) -> int:
        """Return the tree of a turn: its parent's, else that of an alternative to it, else its own."""
        if parent is not None:
            return self._trees[parent]
        answered = self._index.answered(row.tokens.prompt_ids)
        tree = turn if answered is None else self._trees[answered]
        if row.parent_id is None:
            return tree
        return self._trees_of.setdefault(split_name(row.parent_id)[0], tree)

    @property
    def _lineage(self) -> Lineage:
        trajectory = self._trajectory
        rewarded = [trajectory.outcome is not None or reward is not None for reward in trajectory.turn_rewards]
        return Lineage(self._parents, self._trees, rewarded)

    def unknown(self) -> Iterator[int]:
        """Yield the ids of rows with an unknown return, if the return of any other row is known."""
        trajectory = self._trajectory
        if any(reward is not None for reward in trajectory.turn_rewards):
            yield from (self._row_ids[turn] for turn in self._lineage.unknown)

    def finish(self) -> Trajectory:
        """Return the trajectory, with the rewards of its sequences."""
        trajectory = self._trajectory
        trajectory.lineage = self._lineage
        left = [list(sequence.ends) for sequence in trajectory.sequences]
        following = [0.0] * len(left)  # return of each sequence's next turn
        rewards = [reward or 0.0 for reward in trajectory.turn_rewards]
        earned = trajectory.lineage.totals(rewards, trajectory.outcome or 0.0)
        for number, value in zip(reversed(trajectory.turns), reversed(earned), strict=True):
            trajectory.sequences[number].rewards[left[number].pop()] = value - following[number]
            following[number] = value
        return trajectory


def _append(sequence: TokenSequence, row: Experience) -> None:
    turn = sequence_of(row)
    sequence.token_ids = turn.token_ids  # the prompt contains the earlier turns
    sequence.ends.append(len(sequence.actions) + turn.ends[0])
    for name in ("actions", "behaviour", "rewards", "versions", "crossed", "sampling", "masked", "starts"):
        setattr(sequence, name, np.concatenate([getattr(sequence, name), getattr(turn, name)]))
    sequence.row_ids += turn.row_ids
