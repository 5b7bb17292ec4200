"""Stage 6, batch: build trajectories from rows, and assign credit to their turns.

A trajectory is one run or one conversation. A turn is merged into an earlier sequence if its prompt begins with the
exact tokens of that sequence, so that T turns cost O(T); otherwise it starts a new sequence. Credit does not depend on
merging. With r_j the reward of turn j and R the outcome of the whole trajectory, turn i has the return

    G_i = R + Σ_j r_j        over the turns j ≥ i of the trajectory, except those of alternatives

(the undiscounted return of Sutton & Barto, "Reinforcement Learning", 2nd edition, eq. 3.7). A sequence's rewards are
the differences between its turns' returns: GAE with γ = 1 and V = 0 gives every turn its G_i, in any sequence.
If neither R nor any of these r_j exists, G_i is unknown, and the turn is left out of the trajectory, without a reward.

Two sequences are alternatives if they answer the same prompt, or if one forks off inside the other: the reward of one
is not a consequence of the other.

Shapes: T tokens of a sequence, A sampled tokens in it, N turns of a trajectory.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.experience import Experience, Sampling, Tokens, TrajectoryKey, choice_name, trajectory_key
from shared.reward import SCORES, reward_key
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
    families: list[int] = field(default_factory=list)  # of each sequence, as the id of a row; alternatives share one
    trunks: list[list[int]] = field(default_factory=list)  # of each sequence: the turns of its family before its fork
    unmerged: Counter[str] = field(default_factory=Counter)  # number of later turns that started a sequence, by reason
    key_group: str | None = None  # separates equal task ids of different groups of keys
    key: str | None = None  # key that scored the newest scored turn
    msg_id: str = ""  # id of its first message; without a task, its choices for one prompt are attempts of one group

    @property
    def has_alternatives(self) -> bool:
        return len(set(self.families)) < len(self.families)

    def turn_spans(self) -> Iterator[tuple[int, int, int]]:
        """For each turn: index of its sequence, its first action there, and the index after its last action."""
        ends = [iter(sequence.ends) for sequence in self.sequences]
        begins = [0] * len(ends)
        for number in self.turns:
            end = next(ends[number]) + 1
            yield number, begins[number], end
            begins[number] = end

    def turn_depths(self) -> Iterator[int]:
        """For each turn: number of turns before it, without those of alternatives.

        Of turns that its prompt contains, those that are not in this trajectory do not count.
        """
        in_family, in_own = Counter[int](), Counter[int]()
        for before, number in enumerate(self.turns):
            family = self.families[number]
            yield before - in_family[family] + len(self.trunks[number]) + in_own[number]
            in_family[family] += 1
            in_own[number] += 1

    def totals(self, values: Sequence[float], start: float = 0.0) -> list[float]:
        """For each turn: `start` plus the values of this turn and of those after it, without those of alternatives."""
        in_all, in_family, in_own = start, defaultdict[int, float](float), defaultdict[int, float](float)
        sums = []
        for number, value in zip(reversed(self.turns), reversed(values), strict=True):
            family = self.families[number]
            in_all += value
            in_family[family] += value
            in_own[number] += value
            sums.append(in_all - (in_family[family] - in_own[number]))
        return sums[::-1]


def trajectories_of(rows: Iterable[Experience]) -> list[Trajectory]:
    """Return the trajectories of a batch, oldest first, with the rewards of their sequences.

    Rows whose rewards were trained on before form separate trajectories: they do not earn new rewards. So do rows with
    an unknown return, for which a return of 0 would mean that they are bad.
    """
    rows = sorted(rows, key=lambda row: row.id)
    families: dict[int, int] = {}  # alternatives remain so without the rows that they branch from
    building = _build(rows, frozenset(), families)
    unknown = frozenset(row_id for builder in building for row_id in builder.unknown())
    return [builder.finish() for builder in (_build(rows, unknown, families) if unknown else building)]


def _build(rows: Iterable[Experience], unknown: Collection[int], families: dict[int, int]) -> Collection[_Builder]:
    """Group rows into trajectories, in row order. unknown: ids of rows with an unknown return.

    families: family of each sequence by its first row; unknown ones are added.
    """
    building: dict[tuple[TrajectoryKey, bool], _Builder] = {}
    for row in rows:
        key = trajectory_key(row), row.is_rewarded and row.id not in unknown
        (building.get(key) or building.setdefault(key, _Builder(row, families))).add(row)
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

    def __init__(self, first: Experience, families: dict[int, int]) -> None:
        self._families = families
        self._trajectory = Trajectory(first.task_id, key_group=first.key_group, msg_id=first.msg_id)
        self._index = SequenceIndex()
        self._last: list[str] = []  # name of the last row of each sequence
        self._last_names: set[str] = set()  # the same names

    def add(self, row: Experience) -> None:
        """Append a turn to the sequence that it continues, or start a new sequence."""
        trajectory = self._trajectory
        number = self._index.take(row.tokens.prompt_ids)
        if number is None:
            number = len(trajectory.sequences)
            rewritten = row.parent_id in self._last_names  # it continues a row of the trajectory, but with other tokens
            extended = self._index.turns_in(row.tokens.prompt_ids)
            known = self._index.answered(row.tokens.prompt_ids)
            if known is None and extended and not rewritten:
                known = trajectory.turns[extended[0]]
            family = self._families.setdefault(row.id, row.id if known is None else trajectory.families[known])
            if number:
                trajectory.unmerged["rewritten" if rewritten else "apart" if family == row.id else "branch"] += 1
            trajectory.trunks.append([t for t in extended if trajectory.families[trajectory.turns[t]] == family])
            trajectory.families.append(family)
            trajectory.sequences.append(sequence_of(row))
            self._last.append("")
        else:
            _append(trajectory.sequences[number], row)
        self._last_names.discard(self._last[number])
        self._last[number] = choice_name(row.msg_id, row.choice)
        self._last_names.add(self._last[number])
        turn = len(trajectory.turns)
        self._index.add(number, turn, row.tokens.prompt_ids, trajectory.sequences[number].token_ids)
        trajectory.turns.append(number)
        trajectory.turn_rewards.append(row.own_reward)
        trajectory.outcome = trajectory.outcome if row.outcome is None else row.outcome
        if row.reward is not None and any(signal.kind in SCORES for signal in row.signals):
            trajectory.key = reward_key(row.signals)

    def unknown(self) -> Iterator[int]:
        """Yield the ids of rows with an unknown return, if the return of any other row is known."""
        trajectory = self._trajectory
        if trajectory.outcome is not None or all(reward is None for reward in trajectory.turn_rewards):
            return
        left = [list(sequence.row_ids) for sequence in trajectory.sequences]
        in_all, in_family, in_own = 0, Counter[int](), Counter[int]()
        for number, reward in zip(reversed(trajectory.turns), reversed(trajectory.turn_rewards), strict=True):
            family, said = trajectory.families[number], reward is not None
            in_all += said
            in_family[family] += said
            in_own[number] += said
            row_id = left[number].pop()
            if in_all == in_family[family] - in_own[number]:
                yield row_id

    def finish(self) -> Trajectory:
        """Return the trajectory, with the rewards of its sequences."""
        trajectory = self._trajectory
        left = [list(sequence.ends) for sequence in trajectory.sequences]
        following = [0.0] * len(left)  # return of each sequence's next turn
        earned = trajectory.totals([reward or 0.0 for reward in trajectory.turn_rewards], trajectory.outcome or 0.0)
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
