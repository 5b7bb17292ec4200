"""A key's share of the gradient: what callers with one key said of a batch is bounded together.

The gradient of a token is proportional to its weight and to how steep the loss is there: its advantage, or the slope of
a loss that is none of advantages, at the start of the batch. So Σ |w_t Â_t| stands for a key's part of it; where a
divergence is learnt, what words change stands for the advantage.
A key with more than its share has all of its weights lowered by one factor. What is left of each key is min(m, c), with
m what it had, and c the largest number for which c ≤ share · Σ min(m, c). Of n keys each may have 1/n.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate

import numpy as np

from trainer_service.algorithms.seam import Batch, Constants, Figures, Said, Unit

# Constants of a loss, by their names: a weight, and what it is multiplied by where the loss has it.
_FACTORS = (("weights", "advantages", "shares", "slopes"), ("divergence_weights", "effects"))


def keys_of(batch: Batch, units: Sequence[Unit]) -> dict[int, str | None]:
    """The key that said what is learnt there, by the number of each member of the units; None: without a key.

    Members that are not trained, or that learn from nothing that anybody said, are left out. A score is that of the
    first member's trajectory.
    """
    scored_by = batch.scored_by
    members = [unit for unit in units for _ in unit.members]
    keys: dict[int, str | None] = {}
    for number, unit in enumerate(members):
        if not unit.trained:
            continue
        if unit.words:
            keys[number] = unit.words[0].key
        elif unit.said is Said.SCORE:
            keys[number] = scored_by[unit.members[0]]
        elif unit.said is not None:
            keys[number] = batch.said_by.get((unit.said, unit.members))
    return keys


def bound_shares(constants: Constants, keys: Mapping[int, Hashable], at_most: float) -> tuple[Constants, Figures]:
    """The constants with weights by which no key has more than its share. Those without weights are left alone.

    keys: of members of the units, by their numbers: the one that said what they learn from. Others are neither counted
    nor lowered. at_most: the largest share, above 0.
    """
    if at_most >= 1 or "weights" not in constants:
        return constants, {}
    masses: dict[Hashable, float] = dict.fromkeys(keys.values(), 0.0)
    weighted = [names for names in _FACTORS if names[0] in constants]
    for names in weighted:
        found = [constants[name] for name in names if name in constants]
        for number, key in keys.items():
            arrays = np.broadcast_arrays(*(of_members[number] for of_members in found))
            masses[key] += float(np.abs(np.prod(arrays, axis=0, dtype=np.float64)).sum())
    whole = sum(masses.values())
    if not whole:
        return constants, {}
    bound = largest_mass(list(masses.values()), at_most)
    factors = {key: np.float32(min(1.0, bound / mass) if mass else 1.0) for key, mass in masses.items()}
    lowered = {
        name: [
            array * factors[keys[number]] if number in keys else array for number, array in enumerate(constants[name])
        ]
        for name, *_ in weighted
    }
    return {**constants, **lowered}, {"largest_key_share": max(masses.values()) / whole}


def largest_mass(masses: Sequence[float], share: float) -> float:
    """c: what a key may have at most, so that it has no more than its share of what all have then."""
    ordered = sorted(mass for mass in masses if mass)  # smallest first
    if share * len(ordered) <= 1:
        return ordered[0]
    rest = list(accumulate(ordered))  # with the `bounded` largest at c: c = share · (bounded · c + rest)
    bounded = 0
    while bounded + 1 < len(ordered) and ordered[-1 - bounded] * (1 - share * bounded) > share * rest[-1 - bounded]:
        bounded += 1
    return share * rest[-1 - bounded] / (1 - share * bounded) if bounded else ordered[-1]
