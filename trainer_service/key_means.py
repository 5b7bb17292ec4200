"""Strict and lenient keys: a reward is compared with the mean reward of its key.

A key that rejects everything does not tell which reply is better, and a strict key means less than its numbers suggest.
With R the return of a sequence that key k scored, m the running mean of all returns, and b_k the key's running mean of
R − m, with m as it was at that time,

    R ← R − n_k b_k / (n_k + κ)

n_k: returns behind b_k, at most WINDOW. It is shrunk towards 0, as if the key had κ returns that equal m. Means of
differences, not of returns: m covers fewer batches than the returns of a rare key, and rewards change meanwhile. The
shift is added at the end of the sequence, so differences between turns do not change. Callers without a key count as
one key.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from trainer_service.algorithms.advantages import running_moments
from trainer_service.algorithms.seam import Batch, Floats, Memory

WINDOW = 256  # sequences
SHRINKAGE = 8.0  # κ, as a number of sequences
MOST_KEYS = 1000  # stored keys; the one that was not seen for the longest time is deleted first


def center_keys(batch: Batch, memory: Memory) -> Batch:
    """Return the batch with the returns of its rewarded sequences shifted by key. Changes `memory`, not the batch."""
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
    known: dict[str, Memory] = memory.setdefault("above", {})
    sequences = list(batch.sequences)
    for key, found in returns.items():
        known[key] = known.pop(key, {})  # last in the order: the most recently seen
        above, _ = running_moments(known[key], [one - mean for one in found], WINDOW)
        count = known[key]["sequences"]
        shift = -count * above / (count + SHRINKAGE)
        for place in places[key]:
            rewards = sequences[place].rewards.copy()
            rewards[sequences[place].ends[-1]] += np.float32(shift)
            sequences[place] = replace(sequences[place], rewards=rewards)
    for key in list(known)[: max(0, len(known) - MOST_KEYS)]:
        del known[key]
    return replace(batch, sequences=sequences)
