"""Stage 6, batch: rows become trajectories, trajectories packed tensors.

Turns of one run whose prompt begins with the exact tokens of the turn before and its reply are merged into one
sequence, so that a conversation of T turns costs O(T). Sequences are packed to a token budget; nothing is padded.
Shapes: T tokens of a packed row, K sampled tokens in it, A sampled tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shared.experience import Experience
from trainer_service.logprobs import SamplingTensors

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(slots=True)
class Trajectory:
    """One token sequence with the actions that were sampled in it."""

    token_ids: Ints  # [T]
    actions: Ints  # [A] positions in token_ids that were sampled
    behaviour: Floats  # [A] the sampler's logprobs
    rewards: Floats  # [A] 0 but at the end of each reply
    versions: Ints  # [A] the version that sampled each
    sampling: Floats  # [A, 4] temperature, top_p, top_k, min_p
    row_ids: list[int] = field(default_factory=list)

    @property
    def token_actions(self) -> Ints:
        """The sampled tokens themselves: [A]"""
        return self.token_ids[self.actions]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed trajectories for one forward pass."""

    input_ids_1T: Tensor
    position_ids_1T: Tensor  # begins at 0 with each trajectory
    keep_K: Tensor  # positions whose logits predict the actions
    actions_K: Tensor  # the sampled tokens
    sampling: SamplingTensors
    members: list[int]  # indices into the batch, in the order of their tokens
    lengths: list[int]  # actions of each member


def assemble(rows: Iterable[Experience]) -> list[Trajectory]:
    """Trajectories of a batch, turns merged where the tokens allow it; oldest first."""
    runs: dict[tuple[str, ...], list[Trajectory]] = {}
    trajectories: list[Trajectory] = []
    for row in sorted(rows, key=lambda row: row.id):
        named = row.task_id is not None and row.run_id is not None
        key = (str(row.task_id), str(row.run_id)) if named else (row.conversation_id,)
        inside = runs.setdefault(key, [])  # a run may hold several: branches, sub-agents
        before = max(
            (t for t in inside if _extends(t, row)), key=lambda trajectory: len(trajectory.token_ids), default=None
        )
        if before is not None:
            _append(before, row)
            continue
        trajectories.append(_begin(row))
        inside.append(trajectories[-1])
    return trajectories


def _begin(row: Experience) -> Trajectory:
    n_prompt, n_reply = len(row.tokens.prompt_ids), len(row.tokens.reply_ids)
    rewards = np.zeros(n_reply, np.float32)
    rewards[-1] = row.reward
    s = row.sampling
    return Trajectory(
        token_ids=np.concatenate([row.tokens.prompt_ids, row.tokens.reply_ids]).astype(np.int64),
        actions=np.arange(n_prompt, n_prompt + n_reply, dtype=np.int64),
        behaviour=row.tokens.logprobs.astype(np.float32),
        rewards=rewards,
        versions=np.full(n_reply, row.version, np.int64),
        sampling=np.tile(np.array([s.temperature, s.top_p, s.top_k, s.min_p], np.float32), (n_reply, 1)),
        row_ids=[row.id],
    )


def _extends(trajectory: Trajectory, row: Experience) -> bool:
    """Whether the row's prompt begins with the trajectory, token for token."""
    length = len(trajectory.token_ids)
    prompt = row.tokens.prompt_ids
    return len(prompt) >= length and bool((prompt[:length] == trajectory.token_ids).all())


def _append(trajectory: Trajectory, row: Experience) -> None:
    turn = _begin(row)
    trajectory.token_ids = turn.token_ids  # it holds the earlier turns already
    for name in ("actions", "behaviour", "rewards", "versions", "sampling"):
        setattr(trajectory, name, np.concatenate([getattr(trajectory, name), getattr(turn, name)]))
    trajectory.row_ids += turn.row_ids


def pack(trajectories: Rows[Trajectory], members: Iterable[int], max_tokens: int) -> list[MicroBatch]:
    """Pack the named trajectories, longest first, each into the first row that has room for it.

    max_tokens: budget of one row; a longer trajectory gets a row of its own.
    """
    bins: list[tuple[int, list[int]]] = []
    for index in sorted(members, key=lambda index: (-len(trajectories[index].token_ids), index)):
        length = len(trajectories[index].token_ids)
        for position, (used, inside) in enumerate(bins):
            if used + length <= max_tokens:
                inside.append(index)
                bins[position] = (used + length, inside)
                break
        else:
            bins.append((length, [index]))
    return [_collate(trajectories, inside) for _, inside in bins]


def _collate(trajectories: Rows[Trajectory], members: list[int]) -> MicroBatch:
    chosen = [trajectories[index] for index in members]
    starts = np.cumsum([0] + [len(t.token_ids) for t in chosen[:-1]])
    sampling_K4 = torch.from_numpy(np.concatenate([t.sampling for t in chosen]))
    return MicroBatch(
        input_ids_1T=torch.from_numpy(np.concatenate([t.token_ids for t in chosen])).unsqueeze(0),
        position_ids_1T=torch.from_numpy(np.concatenate([np.arange(len(t.token_ids)) for t in chosen])).unsqueeze(0),
        keep_K=torch.from_numpy(np.concatenate([s + t.actions - 1 for s, t in zip(starts, chosen, strict=True)])),
        actions_K=torch.from_numpy(np.concatenate([t.token_actions for t in chosen])),
        sampling=SamplingTensors(*(sampling_K4[:, column].contiguous() for column in range(4))),
        members=members,
        lengths=[len(t.actions) for t in chosen],
    )


def gather(arrays: Rows[Floats], micro: MicroBatch) -> Tensor:
    """One [A] array for each trajectory of the batch → [K] in the micro-batch's order."""
    return torch.from_numpy(np.concatenate([arrays[index] for index in micro.members]))


def scatter(values_K: Tensor, micro: MicroBatch, into: list[Floats]) -> None:
    """[K] in the micro-batch's order → one [A] array for each of its trajectories."""
    parts = np.split(values_K.cpu().numpy(), np.cumsum(micro.lengths)[:-1])
    for index, part in zip(micro.members, parts, strict=True):
        into[index] = part.astype(np.float32)
