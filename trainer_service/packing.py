"""Stage 6, batch: pack trajectories into tensors, without padding, within a token budget.

A row stores a prefix that its trajectories share once (`prefix_tree`). Shapes: T tokens of a packed row,
K sampled tokens of its trajectories, A sampled tokens of one trajectory.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer_service.attention import Layout
from trainer_service.logprobs import SamplingTensors
from trainer_service.penalties import Penalties
from trainer_service.prefix_tree import Order, fold
from trainer_service.trajectories import TokenSequence


class Rows(Enum):
    """Row layouts that a model can compute; `self_test.check_rows` determines the layout."""

    FOLDED = "folded"  # several sequences in a row, shared prefixes once
    PACKED = "packed"  # several sequences in a row, each complete
    SINGLE = "single"  # one sequence in a row; the members of a unit are a batch of rows


def fewest(found: Iterable[Rows]) -> Rows:
    """Return the least dense of these layouts; a model that supports a denser one supports it, too."""
    return max(found, key=list(Rows).index)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed trajectories for one forward pass: all in one row or, if `apart`, each in a row of its own."""

    input_ids_1T: Tensor
    position_ids_1T: Tensor  # position of each token in its trajectory
    layout: Layout  # which tokens belong to the same sequences
    keep_K: Tensor  # positions in the row whose logits predict the actions
    actions_K: Tensor  # the sampled tokens
    sampling: SamplingTensors
    members: list[int]  # indices into the batch, in the order of their actions
    lengths: list[int]  # number of actions of each member
    tokens_in: int  # of all members; the row has fewer if members share prefixes
    apart: bool = False  # if True, the members follow one another here, and the model gets one padded row for each

    def to(self, device: torch.device) -> MicroBatch:
        """Return the micro-batch with its tensors on a device, or itself if they are already there."""
        if self.input_ids_1T.device == device:
            return self
        return replace(
            self,
            input_ids_1T=self.input_ids_1T.to(device),
            position_ids_1T=self.position_ids_1T.to(device),
            keep_K=self.keep_K.to(device),
            actions_K=self.actions_K.to(device),
            sampling=self.sampling.to(device),
        )


class _Row:
    """The sequences of one row, by rank, and the number of its tokens."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._ranks: list[int] = []
        self.tokens = 0

    def add(self, index: int) -> None:
        order, rank = self._order, self._order.rank[index]
        place = bisect.bisect(self._ranks, rank)
        before = order.shared(self._ranks[place - 1], rank) if place else 0
        after = order.shared(rank, self._ranks[place]) if place < len(self._ranks) else 0
        self._ranks.insert(place, rank)
        self.tokens += len(order.sequences[index]) - max(before, after)

    def with_unit(self, unit: Sequence[int]) -> _Row:
        row = _Row(self._order)
        row._ranks, row.tokens = self._ranks.copy(), self.tokens
        for index in unit:
            row.add(index)
        return row

    @property
    def members(self) -> list[int]:
        return [self._order.ranked[rank] for rank in self._ranks]


def pack(
    trajectories: Sequence[TokenSequence],
    members: Iterable[int],
    max_tokens: int,
    rows: Rows = Rows.FOLDED,
    units: Iterable[Sequence[int]] = (),
) -> list[MicroBatch]:
    """Pack the named trajectories into few rows.

    max_tokens: of one row; a longer trajectory gets a row of its own. units: members that must share a micro-batch.
    """
    names = list(dict.fromkeys(members))
    number = {name: position for position, name in enumerate(names)}
    order = Order([trajectories[name].token_ids for name in names], fold=rows is Rows.FOLDED)
    kept = [[number[name] for name in unit] for unit in units]
    alone = set(range(len(names))).difference(*kept)
    items = sorted([*kept, *([index] for index in alone)], key=lambda unit: order.rank[unit[0]])
    bins = _join(_trees(order, items, max_tokens), max_tokens if rows is not Rows.SINGLE else 0)
    return [
        replace(_collate(trajectories, order, names, found), apart=rows is Rows.SINGLE and len(found) > 1)
        for found in bins
    ]


def _trees(order: Order, units: list[list[int]], max_tokens: int) -> list[_Row]:
    """Group units that share prefixes into rows, as large as the budget allows. units: sorted by rank."""
    found: list[_Row] = []
    row = _Row(order)
    for unit in units:
        grown, alone = row.with_unit(unit), _Row(order).with_unit(unit)
        shares = grown.tokens < row.tokens + alone.tokens
        if not (shares and grown.tokens <= max_tokens):
            found.append(row)
            grown = alone
        row = grown
    return [one for one in (*found, row) if one.tokens]


def _join(rows: list[_Row], max_tokens: int) -> list[list[int]]:
    """Join rows by best fit, largest first: each goes into the fullest bin with room for it. Returns members."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # sorted: tokens left, index of the bin
    for row in sorted(rows, key=lambda row: -row.tokens):
        fit = bisect.bisect_left(room, (row.tokens, -1))
        left, number = room.pop(fit) if fit < len(room) else (max_tokens, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number] += row.members
        bisect.insort(room, (left - row.tokens, number))
    return bins


def _collate(trajectories: Sequence[TokenSequence], order: Order, names: list[int], found: list[int]) -> MicroBatch:
    chosen = [trajectories[names[index]] for index in found]
    tree = fold(order, found)
    sampling_K7 = torch.from_numpy(np.concatenate([t.sampling for t in chosen]))
    columns = [sampling_K7[:, number].contiguous() for number in range(4)]
    keep = [places[t.actions - 1] for places, t in zip(tree.places, chosen, strict=True)]
    return MicroBatch(
        input_ids_1T=torch.from_numpy(tree.token_ids_T).unsqueeze(0),
        position_ids_1T=torch.from_numpy(tree.positions_T).unsqueeze(0),
        layout=Layout(tree.nodes),
        keep_K=torch.from_numpy(np.concatenate(keep)),
        actions_K=torch.from_numpy(np.concatenate([t.token_actions for t in chosen])),
        sampling=SamplingTensors(columns[0], columns[1], columns[2], columns[3], Penalties.of(chosen)),
        members=[names[index] for index in found],
        lengths=[len(t.actions) for t in chosen],
        tokens_in=sum(len(t.token_ids) for t in chosen),
    )


def scatter(values_K: Tensor, micro: MicroBatch, into: list[Any]) -> None:
    """Split [K] or [K, N], in the micro-batch's order, into one [A] or [A, N] array for each of its trajectories."""
    parts = np.split(values_K.cpu().numpy(), np.cumsum(micro.lengths)[:-1])
    for index, part in zip(micro.members, parts, strict=True):
        into[index] = part.astype(np.int64 if part.dtype.kind == "i" else np.float32)
