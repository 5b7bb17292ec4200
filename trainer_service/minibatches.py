"""Divides sequences into minibatches of about equal token count, one for each optimizer step, without splitting blocks.

A block is a set of sequences that units connect: their losses depend on each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

Block = tuple[int, ...]  # places of sequences, in ascending order


def blocks_of(groups: Iterable[Sequence[int]]) -> list[Block]:
    """Join groups that share a member into blocks, ordered by their smallest members. Each sequence is in one block."""
    leader: dict[int, int] = {}

    def find(place: int) -> int:
        while leader.setdefault(place, place) != place:
            leader[place] = leader[leader[place]]
            place = leader[place]
        return place

    for first, *others in groups:
        for other in (first, *others):
            low, high = sorted((find(first), find(other)))
            leader[high] = low
    members: dict[int, list[int]] = {}
    for place in sorted(leader):
        members.setdefault(find(place), []).append(place)
    return [tuple(block) for block in members.values()]


def even_minibatches(costs: Sequence[int], count: int, order: np.random.Generator) -> list[list[int]]:
    """Divide blocks into at most `count` minibatches of about equal cost, none of them empty. Returns block numbers.

    costs: tokens of each block. Blocks are assigned largest first, each to the minibatch with the lowest cost, so that
    costs differ by at most one block. `order` decides between equal blocks and shuffles the minibatches.
    """
    count = min(count, len(costs))
    parts: list[list[int]] = [[] for _ in range(count)]
    totals = [0] * count
    for block in sorted(order.permutation(len(costs)).tolist(), key=lambda block: -costs[block]):
        lightest = min(range(count), key=lambda part: (totals[part], len(parts[part])))
        parts[lightest].append(block)
        totals[lightest] += costs[block]
    return [parts[part] for part in order.permutation(count).tolist()]
