"""Strict keys and mild ones: a reward is compared with what its key gives otherwise.

A key that likes nothing says nothing about which reply is better, and one that is strict says less than its numbers do.
With R the return of a sequence that key k spoke of, m the running mean of all returns and m_k that of the key's,

    R ← R + m − (n_k m_k + κ m) / (n_k + κ)

n_k: returns behind m_k, at most WINDOW. A new key's mean is shrunk towards that of all by κ of them. The difference is
added at the sequence's end, so that differences between turns stay as they are. Callers without a key are one key.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from trainer_service.algorithms.advantages import running_moments
from trainer_service.algorithms.seam import Batch, Floats, Memory

WINDOW = 256  # sequences
SHRINKAGE = 8.0  # κ, in sequences
MOST_KEYS = 1000  # that are remembered; the one not seen for the longest time goes first


def center_keys(batch: Batch, memory: Memory) -> Batch:
    """The batch with the returns of its rewarded sequences shifted by key. Changes `memory`, not the batch."""
    returns: dict[str, list[Floats]] = defaultdict(list)
    places: dict[str, list[int]] = defaultdict(list)
    keys = batch.scored_by
    for place in batch.rewarded:
        key = keys[place] or ""
        returns[key].append(batch.sequences[place].rewards.sum(keepdims=True))
        places[key].append(place)
    if not returns:
        return batch
    everything = [one for found in returns.values() for one in found]
    mean, _ = running_moments(memory.setdefault("all", {}), everything, WINDOW)
    known: dict[str, Memory] = memory.setdefault("keys", {})
    sequences = list(batch.sequences)
    for key, found in returns.items():
        known[key] = known.pop(key, {})  # at the end: seen last
        own, _ = running_moments(known[key], found, WINDOW)
        count = known[key]["sequences"]
        shift = mean - (count * own + SHRINKAGE * mean) / (count + SHRINKAGE)
        for place in places[key]:
            rewards = sequences[place].rewards.copy()
            rewards[sequences[place].ends[-1]] += np.float32(shift)
            sequences[place] = replace(sequences[place], rewards=rewards)
    for key in list(known)[: max(0, len(known) - MOST_KEYS)]:
        del known[key]
    return replace(batch, sequences=sequences)
