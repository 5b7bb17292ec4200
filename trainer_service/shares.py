"""A key's share of the gradient: a bound on the total effect of the signals of all callers with one key in a batch.

The gradient of a token is proportional to its weight and to the slope of the loss: its advantage or, for a loss without
advantages, the slope at the start of the batch. So Σ |w_t Â_t| measures a key's part of the gradient; where a
divergence is minimized, the effect of the words replaces the advantage.
If a key exceeds its share, all its weights are multiplied by one factor. Each key keeps min(m, c), with m what it had,
and c the largest number for which c ≤ share · Σ min(m, c). With n keys, each may have at least 1/n.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate

import numpy as np

from trainer_service.algorithms.seam import Batch, Constants, Figures, Said, Unit

# Names of constants of a loss: a weight, and its factors where the loss has them.
_FACTORS = (("weights", "advantages", "shares", "slopes"), ("divergence_weights", "effects"))


def keys_of(batch: Batch, units: Sequence[Unit]) -> dict[int, str | None]:
    """Return the key that sent the signal behind each member of the units, by the member's number; None: no key.

    Members that are not trained, or that learn from no signal, are left out. A score belongs to the first member's
    trajectory.
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
    """Return the constants with weights that leave no key more than its share. Constants without weights do not change.

    keys: the key that sent the signal behind a member, by the member's number. Other members are neither counted nor
    reduced. at_most: the largest share, above 0.
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
    """Return c, the largest mass of a key that is at most its share of the total after all keys are bounded."""
    ordered = sorted(mass for mass in masses if mass)  # ascending
    if share * len(ordered) <= 1:
        return ordered[0]
    rest = list(accumulate(ordered))  # with the `bounded` largest at c: c = share · (bounded · c + rest)
    bounded = 0
    while bounded + 1 < len(ordered) and ordered[-1 - bounded] * (1 - share * bounded) > share * rest[-1 - bounded]:
        bounded += 1
    return share * rest[-1 - bounded] / (1 - share * bounded) if bounded else ordered[-1]
