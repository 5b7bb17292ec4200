"""ALFWorld as a text environment: one game at a time in TextWorld, with actions parsed from a model's answers.

A game comes from houses.py, made from a seed, or from a game.tw-pddl file of ALFWorld's download. An answer gives its
action between <action> and </action>. An answer without an action, or with an impossible one, gets an error message
and counts as a step: every episode ends after at most MAX_STEPS steps.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from third-party libraries, at import
    import fast_downward
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld.envs import PddlEnv
    from textworld.envs.pddl import logic, textgen
    from textworld.logic import Rule

from examples.alfworld.houses import KINDS, NOTHING, game_of, make_house

MAX_STEPS = 30
UNFINISHED = -0.1
NO_ACTION = "No action was found. Write one action between <action> and </action>."
_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)
SPLITS = {"train": "train", "seen": "valid_seen", "unseen": "valid_unseen"}


class Household:
    """A game played in text: an environment for flywheel.play.

    plans: also compute a plan at each step, which is slower. A household can run one task after another. Each one keeps
    a copy of the planner's library in memory permanently.
    """

    def __init__(self, task: Mapping[str, Any], *, plans: bool = False, max_steps: int = MAX_STEPS) -> None:
        _keep_parses()
        infos = textworld.EnvInfos(won=True, admissible_commands=True, policy_commands=plans)
        self._env = AlfredDemangler(PddlEnv(infos), shuffle=False)
        self._state: Any = None
        self._max_steps = max_steps
        self.load(task)

    def load(self, task: Mapping[str, Any]) -> None:
        """Load a task. task: `seed` and the other arguments of make_house, or `game_file`."""
        self.task, self.steps, self.happened = dict(task), 0, 0
        file = task.get("game_file")
        self._env.load(json.loads(Path(file).read_text()) if file else game_of(make_house(**task)))

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Start the episode. seed: ignored; the environment is deterministic."""
        self._state, self.steps, self.happened = self._env.reset(), 0, 0
        return _plain(self._state.feedback), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Do the action between <action> and </action>; the last one if there are several."""
        command = read_action(action)
        self.steps += 1
        if command is None:
            observation = NO_ACTION
        else:
            self._state, _, _ = self._env.step(command)
            observation = _plain(self._state.feedback)
            self.happened += observation != NOTHING
        won = bool(self._state.won)
        truncated = not won and self.steps >= self._max_steps
        return observation, 1.0 if won else UNFINISHED if truncated else 0.0, won, truncated, self._info()

    def _info(self) -> dict[str, Any]:
        possible, plan = list(self._state.admissible_commands), list(self._state.policy_commands or ())
        return {"possible": possible, "plan": plan, "happened": self.happened}


@functools.cache
def _keep_parses() -> None:
    """Cache TextWorld's parsing of each grammar, template and condition, and its translation of each house.

    TextWorld parses a game's grammar at each load and a template for every sentence, copies each sentence's variables
    several times, and translates a house four times an episode. It has no public cache for any of these, so this
    replaces private functions for the whole process. TextWorld modifies a parsed template in place, so each caller gets
    its own copy. It adds to a sentence's variables but does not modify them, so a copy of the dictionary is enough.
    """
    logic._parse_and_convert = functools.lru_cache(maxsize=1024)(logic._parse_and_convert)
    parse = functools.lru_cache(maxsize=4096)(textgen._parse_and_convert)
    textgen._parse_and_convert = lambda *args, **options: deepcopy(parse(*args, **options))
    textgen.copy_context = _copy_context
    Rule.parse_conjunctive_query = functools.lru_cache(maxsize=1024)(Rule.parse_conjunctive_query)
    fast_downward.pddl2sas = functools.lru_cache(maxsize=1024)(fast_downward.pddl2sas)


def _copy_context(context: dict[str, Any]) -> dict[str, Any]:
    """Copy a sentence's context, but not the variables themselves."""
    return {**context, "variables": dict(context["variables"]), "mapping": dict(context["mapping"])}


class Households:
    """A pool of free households, which keeps the number of households small."""

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        self._free: list[Household] = []
        self._max_steps = max_steps

    @contextlib.contextmanager
    def enter(self, task: Mapping[str, Any]) -> Iterator[Household]:
        """Yield a household with this task, for exclusive use inside the block."""
        at_hand = next((one for one in self._free if one.task == task), None)
        house = at_hand or (self._free[0] if self._free else Household(task, max_steps=self._max_steps))
        if house in self._free:
            self._free.remove(house)
        if house.task != task:
            house.load(task)
        try:
            yield house
        finally:
            self._free.append(house)


def _plain(text: str) -> str:
    """Return a text of the game without empty lines and banner."""
    lines = [line.strip() for line in text.splitlines()]
    return "\n".join(line for line in lines if line and not line.startswith("-="))


def read_action(answer: str) -> str | None:
    """Return the last action of an answer, or None if there is none."""
    found = _ACTION.findall(answer)
    return " ".join(found[-1].split()) or None if found else None


def downloaded(split: str) -> list[dict[str, Any]]:
    """Return the tasks of ALFWorld's downloaded games in ALFWORLD_DATA. split: train, seen or unseen."""
    home = os.environ.get("ALFWORLD_DATA")
    folder = Path(home, "json_2.1.1", SPLITS[split]) if home else None
    files = sorted(folder.rglob("game.tw-pddl")) if folder else []
    return [{"game_file": str(file)} for file in files if _can_be_played(file)]


def _can_be_played(file: Path) -> bool:
    if "movable" in str(file) or "Sliced" in str(file):
        return False
    told = json.loads(file.with_name("traj_data.json").read_text())
    return told["task_type"] in KINDS and bool(json.loads(file.read_text()).get("solvable"))
