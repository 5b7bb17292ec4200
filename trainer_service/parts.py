"""The algorithms of an update: what each one sees of a micro-batch, and what its loss contributes.

A part is one algorithm with the weight of its loss. Its figures are means over its size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np
import torch
from torch import Tensor

from trainer_service.algorithms.seam import Algorithm, Batch, Constants, Figures, Ints, Needs, Now, Unit
from trainer_service.logprobs import Scores
from trainer_service.packing import MicroBatch
from trainer_service.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Part:
    """One algorithm and the weight of its loss."""

    algorithm: Algorithm
    weight: float = 1.0


def needs_of(parts: Iterable[Part]) -> Needs:
    """Return what the algorithms need together."""
    return reduce(or_, (part.algorithm.needs for part in parts), Needs.NOTHING)


class Work:
    """One part's work on one batch."""

    def __init__(self, part: Part, units: list[Unit], constants: Constants, figures: Figures) -> None:
        """constants: see `seam.Constants`."""
        self._part, self._units, self._constants, self._figures = part, units, constants, figures
        self._firsts = np.cumsum([0, *(len(unit.members) for unit in units)]).tolist()
        self._beginning: dict[int, list[int]] = {}  # trained units by their first member
        for number, unit in enumerate(units):
            if unit.trained:
                self._beginning.setdefault(unit.members[0], []).append(number)
        self._sums: dict[str, float] = {}
        self._sizes = 0.0

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The members of each trained unit."""
        return [unit.members for unit in self._units if unit.trained]

    def rows(self, batch: Batch) -> set[int]:
        """Return the ids of the rows that the trained units learn from: of a unit with words, those of their turns."""
        found: set[int] = set()
        for unit in (unit for unit in self._units if unit.trained):
            for number, place in enumerate(unit.members):
                sequence = batch.sequences[place]
                about = unit.words[number].actions if unit.words else sequence.ends
                turns = np.unique(np.searchsorted(sequence.ends, about))
                found.update(sequence.row_ids[turn] for turn in turns)
        return found

    def size_of(self, places: Iterable[int]) -> float:
        """Return the divisor of this part's loss in a minibatch of these sequences, and add it to the batch's size."""
        units = self._units_in(places)
        size = self._part.algorithm.size([self._units[unit] for unit in units], self._slice(units)) if units else 0.0
        self._sizes += size
        return size

    def loss(self, micro: MicroBatch, scores: Scores, size: float) -> Tensor | float:
        """Return this part's share of a minibatch's loss; 0 if it has no unit in this micro-batch. size: divisor."""
        units = self._units_in(micro.members)
        if not units or not size:
            return 0.0
        now = self._view_of(units, micro, scores)
        device = now.logprobs_K.device
        constants = {
            name: torch.from_numpy(np.concatenate(arrays)).to(device)
            for name, arrays in self._slice(units).items()
            if name != "others"  # `now` has the scores of these tokens
        }
        loss, sums = self._part.algorithm.loss(now, constants)
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value)
        return self._part.weight * (loss / size)

    def figures(self, ranks: Ranks) -> Figures:
        """Return figures of the batch, and means over all minibatches and ranks."""
        of_ranks = ranks.gather_json(self._sums)
        self._sums = {name: sum(sums.get(name, 0.0) for sums in of_ranks) for sums in of_ranks for name in sums}
        return self._figures | {name: value / self._sizes for name, value in self._sums.items()}

    def others(self, place: int, length: int) -> Ints | None:
        """Return further tokens that the loss scores in a sequence of this many actions, [A, N], or None.

        Each unit names tokens at the actions that its words are about, which no other unit's are; elsewhere they are 0.
        """
        units = self._beginning.get(place, [])
        if "others" not in self._constants or not units:
            return None
        asked = self._slice(units)["others"]
        found = np.zeros((length, asked[0].shape[1]), np.int64)
        for unit, tokens in zip(units, asked, strict=True):
            found[_actions(self._units[unit], {place: length})[0]] = tokens
        return found

    def _units_in(self, places: Iterable[int]) -> list[int]:
        return [unit for place in places for unit in self._beginning.get(place, ())]

    def _slice(self, units: Sequence[int]) -> Constants:
        """Return the constants of these units' members."""
        numbers = [number for unit in units for number in range(self._firsts[unit], self._firsts[unit + 1])]
        return {name: [arrays[number] for number in numbers] for name, arrays in self._constants.items()}

    def _view_of(self, units: list[int], micro: MicroBatch, scores: Scores) -> Now:
        """Return the micro-batch as these units see it: one unit after another, whatever else is packed with them."""
        begins = dict(zip(micro.members, np.cumsum([0, *micro.lengths]), strict=False))
        lengths = dict(zip(micro.members, micro.lengths, strict=True))
        owners = [order for order, unit in enumerate(units) for _ in self._units[unit].members]
        places = [
            begins[place] + actions
            for unit in (self._units[number] for number in units)
            for place, actions in zip(unit.members, _actions(unit, lengths), strict=True)
        ]
        sequences = np.repeat(np.arange(len(places)), [len(of_member) for of_member in places])
        device = scores["logprobs"].device
        index_K = torch.from_numpy(np.concatenate(places)).to(device)
        values_K = scores.get("values")
        return Now(
            logprobs_K=scores["logprobs"][index_K],
            entropy_K=scores["entropy"][index_K],
            values_K=None if values_K is None else values_K[index_K],
            others_KN=scores["others"][index_K] if "others" in self._constants else None,
            sequence_K=torch.from_numpy(sequences).to(device),
            unit_S=torch.tensor(owners, device=device),
        )


def _actions(unit: Unit, lengths: Mapping[int, int]) -> list[Ints]:
    """Return the actions of each member that the unit's loss is about: those with words, or else all.

    lengths: number of actions of each sequence, by place.
    """
    if unit.words:
        return [words.actions for words in unit.words]
    return [np.arange(lengths[place]) for place in unit.members]


def others_of(micro: MicroBatch, works: Sequence[Work]) -> Tensor | None:
    """Return the further tokens that any part scores, [K, N]; None: no part scores further tokens."""
    found = {
        place: asked
        for work in works
        for place, length in zip(micro.members, micro.lengths, strict=True)
        if (asked := work.others(place, length)) is not None
    }
    if not found:
        return None
    count = max(asked.shape[1] for asked in found.values())
    nothing = (np.zeros((length, count), np.int64) for length in micro.lengths)
    rows = [found.get(place, zeros) for place, zeros in zip(micro.members, nothing, strict=True)]
    return torch.from_numpy(np.concatenate(rows))
