"""Frozen lakes: gymnasium's environment as text, with random start and goal.

A size, a fraction of frozen cells and a seed define a lake. Its goal is reachable within MAX_STEPS. An answer without a
move counts as a step, so every episode ends.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterator
from typing import Any

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

SIZE, FROZEN, MAX_STEPS = 4, 0.8, 8
MOVES = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}  # in gymnasium's order: its actions 0 to 3
SIGNS = {"S": "_", "F": "_", "H": "O", "G": "G"}
NAMES = {"S": "frozen", "F": "frozen", "H": "hole", "G": "goal"}
_FENCED = re.compile(r"```\s*(\w+)\s*```")


def make_map(seed: int, size: int = SIZE, frozen: float = FROZEN) -> list[str]:
    """Return rows of S, F, H and G. The shortest path from S to G has at most MAX_STEPS moves."""
    draw = random.Random(f"lake {seed}")
    while True:
        cells = [["F" if draw.random() < frozen else "H" for _ in range(size)] for _ in range(size)]
        start, goal = draw.sample([(row, column) for row in range(size) for column in range(size)], 2)
        cells[start[0]][start[1]], cells[goal[0]][goal[1]] = "S", "G"
        lake = ["".join(row) for row in cells]
        if 0 < distance(lake) <= MAX_STEPS:
            return lake


def distance(lake: list[str]) -> int:
    """Return the length of the shortest path from start to goal around the holes, or -1 if there is none."""
    start = next((row, line.index("S")) for row, line in enumerate(lake) if "S" in line)
    seen, waiting = {start}, deque([(start, 0)])
    while waiting:
        place, moves = waiting.popleft()
        for _, there, kind in neighbours(lake, place):
            if kind == "G":
                return moves + 1
            if kind in "FS" and there not in seen:
                seen.add(there)
                waiting.append((there, moves + 1))
    return -1


def neighbours(lake: list[str], place: tuple[int, int]) -> Iterator[tuple[str, tuple[int, int], str]]:
    """Yield each move that stays on the lake: its name, the position it leads to, and the type of that cell."""
    for move, (down, right) in MOVES.items():
        row, column = place[0] + down, place[1] + right
        if 0 <= row < len(lake) and 0 <= column < len(lake):
            yield move, (row, column), lake[row][column]


class Lake:
    """A lake played in text: an environment for flywheel.play."""

    def __init__(self, seed: int, size: int = SIZE) -> None:
        self.map = make_map(seed, size)
        self._env = FrozenLakeEnv(desc=self.map, is_slippery=False)
        self.steps = 0

    @property
    def place(self) -> tuple[int, int]:
        """Row and column of the player."""
        return divmod(int(self._env.s), len(self.map))

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Start the episode. seed: ignored; the environment is deterministic."""
        self._env.reset(seed=seed)
        start = next((row, line.index("S")) for row, line in enumerate(self.map) if "S" in line)
        self._env.s = start[0] * len(self.map) + start[1]
        self.steps = 0
        return self._observation(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Do the move between three backquotes; the last one if there are several."""
        move = read_move(action)
        self.steps += 1
        terminated, reward = False, 0.0
        if move is not None:
            _, reward, terminated, _, _ = self._env.step(list(MOVES).index(move))
        truncated = not terminated and self.steps >= MAX_STEPS
        observation = self._observation() if move is not None else f"That names no move.\n{self._observation()}"
        return observation, float(reward), bool(terminated), truncated, {"valid": move is not None}

    def _observation(self) -> str:
        """Return the map, the direction of the goal, and the cells around the player."""
        row, column = self.place
        rows = [[SIGNS[cell] for cell in line] for line in self.map]
        rows[row][column] = "P"
        around = {move: NAMES[kind] for move, _, kind in neighbours(self.map, self.place)}
        goal = next((r, line.index("G")) for r, line in enumerate(self.map) if "G" in line)
        down, right = goal[0] - row, goal[1] - column
        ways = [f"{abs(n)} {less if n < 0 else more}" for n, less, more in _directions(down, right) if n]
        beside = " ".join(f"{move}: {around.get(move, 'edge')}." for move in MOVES)
        return "\n".join(" ".join(line) for line in rows) + f"\nGoal: {', '.join(ways) or 'here'}. {beside}"


def _directions(down: int, right: int) -> tuple[tuple[int, str, str], ...]:
    return (down, "up", "down"), (right, "left", "right")


def read_move(answer: str) -> str | None:
    """Return the last move between three backquotes, in any letter case, or None if there is none."""
    named = [word.capitalize() for word in _FENCED.findall(answer)]
    return named[-1] if named and named[-1] in MOVES else None
