"""Folds sequences into a tree of shared prefixes, so that each prefix is computed once.

A row of tokens contains trees of nodes. A node is a run of tokens that continues its parent; a sequence is the path
from a root to the node where it ends. Nodes are in depth-first order: each follows its parent.
Shapes: T tokens of a row, N of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

MIN_SHARED = 8  # tokens; attention over a shorter shared prefix costs more than it saves


@dataclass(frozen=True, slots=True)
class Node:
    """Tokens `start` to `end` of a row, which continue the node `parent`."""

    start: int
    end: int
    parent: int  # -1: a root
    depth: int  # position of its first token in every sequence that contains it


@dataclass(frozen=True, slots=True)
class Tree:
    """The sequences of one row."""

    nodes: tuple[Node, ...]
    token_ids_T: Ints
    positions_T: Ints  # position of each token in its sequences
    places: list[Ints]  # [N] of each sequence: indices of its tokens in the row


class Order:
    """Sequences in lexicographic order, and the length of the prefix that each shares with the one before it."""

    def __init__(self, sequences: Sequence[npt.NDArray[Any]], *, fold: bool = True) -> None:
        self.sequences = sequences
        keys = [np.ascontiguousarray(ids, dtype=">i8").tobytes() for ids in sequences]
        self.ranked = sorted(range(len(sequences)), key=lambda index: (keys[index], index))
        self.rank = {index: rank for rank, index in enumerate(self.ranked)}
        self._shared = np.zeros(len(sequences), np.int64)
        if fold:
            for rank in range(1, len(sequences)):
                self._shared[rank] = _shared(*(sequences[index] for index in self.ranked[rank - 1 : rank + 1]))

    def shared(self, first: int, second: int) -> int:
        """Return the length of the common prefix of the sequences with two ranks, first < second, in tokens."""
        return int(self._shared[first + 1 : second + 1].min())


def _shared(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    count = int(differ[0]) if len(differ) else length
    return count if count >= MIN_SHARED else 0


def fold(order: Order, members: Sequence[int]) -> Tree:
    """Fold the named sequences into one row. Its `places` are in the order of `members`."""
    ranks = sorted(order.rank[index] for index in members)
    shared = np.array([0, *(order.shared(a, b) for a, b in pairwise(ranks))], np.int64)
    nodes: list[Node] = []
    pieces: list[npt.NDArray[Any]] = []
    places: dict[int, Ints] = {}
    todo = [(0, len(ranks), -1, 0)]  # first rank, last rank + 1, parent node, depth at the parent's end
    while todo:
        low, high, parent, depth = todo.pop()
        token_ids = order.sequences[order.ranked[ranks[low]]]
        common = int(shared[low + 1 : high].min()) if high > low + 1 else len(token_ids)
        if common > depth:
            start = nodes[-1].end if nodes else 0
            nodes.append(Node(start, start + common - depth, parent, depth))
            pieces.append(token_ids[depth:common])
            parent = len(nodes) - 1
        while low < high and len(order.sequences[order.ranked[ranks[low]]]) == common:  # they end at this node
            places[order.ranked[ranks[low]]] = _path(nodes, parent)
            low += 1
        if low < high:
            cuts = [low, *(low + 1 + np.flatnonzero(shared[low + 1 : high] == common)).tolist(), high]
            todo += [(a, b, parent, common) for a, b in reversed(list(pairwise(cuts)))]
    return Tree(
        nodes=tuple(nodes),
        token_ids_T=np.concatenate(pieces).astype(np.int64),
        positions_T=np.concatenate([np.arange(n.depth, n.depth + n.end - n.start) for n in nodes]),
        places=[places[index] for index in members],
    )


def _path(nodes: Sequence[Node], last: int) -> Ints:
    return np.concatenate([np.arange(nodes[n].start, nodes[n].end) for n in path(nodes, last)])


def path(nodes: Sequence[Node], last: int) -> list[int]:
    """Return the nodes from a root to `last`."""
    found = []
    while last >= 0:
        found.append(last)
        last = nodes[last].parent
    return found[::-1]
