"""The algorithms of an update: what each one sees of a micro-batch, and what its loss contributes.

A part is one algorithm with the weight of its loss. Its figures are means over its size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer_service.algorithms.seam import Algorithm, Constants, Figures, Now, Unit
from trainer_service.logprobs import Scores
from trainer_service.packing import MicroBatch
from trainer_service.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Part:
    """One algorithm and the weight of its loss."""

    algorithm: Algorithm
    weight: float = 1.0


class Work:
    """One part's work on one batch."""

    def __init__(self, part: Part, units: list[Unit], constants: Constants, figures: Figures) -> None:
        """constants: one array for each member of the units, in their order."""
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
            name: torch.from_numpy(np.concatenate(arrays)).to(device) for name, arrays in self._slice(units).items()
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

    def others(self, place: int) -> npt.NDArray[np.int64] | None:
        """Return further tokens that the loss scores in a sequence, [A, N], or None. Tokens of several units are added:
        each unit names tokens at its own actions, and 0 at the others."""
        if "others" not in self._constants:
            return None
        arrays = self._slice(self._beginning.get(place, []))["others"]
        return np.sum(arrays, axis=0, dtype=np.int64) if arrays else None

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
        members = [place for unit in units for place in self._units[unit].members]
        owners = [order for order, unit in enumerate(units) for _ in self._units[unit].members]
        index = np.concatenate([np.arange(begins[place], begins[place] + lengths[place]) for place in members])
        device = scores["logprobs"].device
        index_K = torch.from_numpy(index).to(device)
        values_K = scores.get("values")
        return Now(
            logprobs_K=scores["logprobs"][index_K],
            entropy_K=scores["entropy"][index_K],
            values_K=None if values_K is None else values_K[index_K],
            others_KN=scores["others"][index_K] if "others" in self._constants else None,
            sequence_K=torch.from_numpy(np.repeat(np.arange(len(members)), [lengths[p] for p in members])).to(device),
            unit_S=torch.tensor(owners, device=device),
        )


def others_of(micro: MicroBatch, works: Sequence[Work]) -> Tensor | None:
    """Return the further tokens that any part scores, [K, N]; None: no part scores further tokens."""
    found = {place: asked for work in works for place in micro.members if (asked := work.others(place)) is not None}
    if not found:
        return None
    count = max(asked.shape[1] for asked in found.values())
    nothing = (np.zeros((length, count), np.int64) for length in micro.lengths)
    rows = [found.get(place, zeros) for place, zeros in zip(micro.members, nothing, strict=True)]
    return torch.from_numpy(np.concatenate(rows))
