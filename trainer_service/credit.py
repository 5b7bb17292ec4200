"""Stage 6, batch: which turns of a trajectory a turn led to, and so what it earns.

A turn continues at most one earlier turn, its parent. So the turns of a trajectory form trees: one for the agent, one
for each helper. Turns that answer the same prompt, or that continue the same turn, are alternatives: choices, tries,
edits. With r_j the reward of turn j and R the outcome of the whole trajectory, turn i has the return

    G_i = R + Σ_j r_j        over turn i and the later turns that it led to

(the undiscounted return of Sutton & Barto, "Reinforcement Learning", 2nd edition, eq. 3.7). Without alternatives, a
turn led to all later turns. It led neither to its own alternatives nor to what continues them: their rewards are no
consequences of it. Of alternatives that begin after it, it led to one: the one whose path is the longest, counted from
the first turn of its tree, of equal ones the first. Without an outcome, it led to one without a reward only if no other
has one.

If neither R nor any of these r_j exists, G_i is unknown: 0 would mean that the turn is bad.

This does not know tokens: credit does not depend on which turns were merged into one sequence.
Shapes: N turns of a trajectory, in the order in which they were sampled.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence


class Lineage:
    """The trees of a trajectory's turns."""

    def __init__(self, parents: Sequence[int | None], trees: Sequence[int], rewarded: Sequence[bool]) -> None:
        """[N] each. parents: the earlier turn that a turn continues. trees: a number for all turns of one tree.

        rewarded: whether the turn has a reward, or the whole an outcome.
        """
        self.trees = trees
        self._parents = parents
        self._rewarded = rewarded
        self._judged = list(rewarded)  # whether it, or a turn that continues it, has a reward
        self._length = [1] * len(parents)  # number of turns on its path, from the first turn of its tree to the last
        self._next: list[int | None] = [None] * len(parents)  # the turn that continues its path
        self._first: dict[int, int] = {}  # by tree: where the main path begins
        for turn, parent in enumerate(parents):
            if parent is not None:
                self._length[turn] += self._length[parent]
        for turn in reversed(range(len(parents))):
            parent, following = parents[turn], self._next[turn]
            if following is not None:
                self._length[turn] = self._length[following]
            if parent is None:
                self._first[trees[turn]] = self._preferred(turn, self._first.get(trees[turn]))
            else:
                self._judged[parent] |= self._judged[turn]
                self._next[parent] = self._preferred(turn, self._next[parent])

    def _preferred(self, turn: int, later: int | None) -> int:
        """Return which of a turn and a later one counts for the turns before both."""
        if later is None or (self._judged[turn], self._length[turn]) >= (self._judged[later], self._length[later]):
            return turn
        return later

    @property
    def sides(self) -> list[int | None]:
        """For each turn: None on the main path of its tree; else the turn with which its side path begins."""
        found: list[int | None] = []
        for turn, parent in enumerate(self._parents):
            if parent is None:
                found.append(None if self._first[self.trees[turn]] == turn else turn)
            else:
                found.append(found[parent] if self._next[parent] == turn else turn)
        return found

    @property
    def unknown(self) -> list[int]:
        """The turns with an unknown return."""
        found, in_all, in_tree = [], 0, Counter[int]()
        for turn in reversed(range(len(self._parents))):
            in_all += self._rewarded[turn]
            in_tree[self.trees[turn]] += self._rewarded[turn]
            if not self._judged[turn] and in_all == in_tree[self.trees[turn]]:
                found.append(turn)
        return found[::-1]

    def totals(self, values: Sequence[float], start: float = 0.0) -> list[float]:
        """For each turn: `start` plus the values of this turn and of those that it led to. values: [N]."""
        path, ahead, in_all, sums = list(values), dict[int, int](), start, []
        for turn in reversed(range(len(path))):
            following, tree = self._next[turn], self.trees[turn]
            path[turn] += 0.0 if following is None else path[following]
            later = ahead.get(tree)
            in_others = in_all - (0.0 if later is None else path[later])
            sums.append(in_others + path[turn])
            ahead[tree] = self._preferred(turn, later)
            in_all = in_others + path[ahead[tree]]
        return sums[::-1]

    def before(self, values: Sequence[float]) -> list[float]:
        """For each turn: the values of the turns before it, without alternatives. values: [N].

        These are the turns that it continues, one after another, and those on the main paths of other trees.
        """
        above: list[float] = []
        in_all, in_tree, sums = 0.0, defaultdict[int, float](float), []
        for turn, (parent, side) in enumerate(zip(self._parents, self.sides, strict=True)):
            tree = self.trees[turn]
            above.append(0.0 if parent is None else above[parent] + values[parent])
            sums.append(in_all - in_tree[tree] + above[turn])
            if side is None:
                in_all += values[turn]
                in_tree[tree] += values[turn]
        return sums
