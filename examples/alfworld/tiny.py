"""The warm start of a tiny model for small houses: it goes, opens, takes and moves things, mostly at random."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from alfworld.gen import constants

from examples import group_learning
from examples.alfworld.houses import NOTHING, PICK, House, make_house, mangled, may_hold, pickable, type_of
from examples.tiny_model import Demonstration, Recipe

ROOM = "Bathroom"  # the room with the fewest types of things
MOST = 4  # receptacles
MAX_STEPS = 12  # replaces the world's 30
STEPS, BATCH = 700, 24
FEW, SHORT, LONG = 500, 5, 10  # first FEW steps of SHORT walks, to learn the names; then LONG walks
SHARE = 0.35  # fraction of demonstrated actions that serve the task
REFUSED = 0.1  # probability of an impossible action before a step; the action is not learned, the step after it is
TRAINING = range(400)  # seeds of houses; each house is loaded for every episode in it
HELD_OUT = range(1_000_000, 1_000_100)
DEMONSTRATED = 2_000_000  # first seed of the demonstration houses, which are in neither range
RULES = "House."  # replaces the agent's rules: a tiny model cannot use the words

ENGINE = {"max_model_len": 1536}
TRAINER = group_learning.TRAINER | {
    "batch_size": 384,
    "learning_rate": 1.5e-4,
    "grpo": group_learning.TRAINER["grpo"] | {"kl_coef": 0.0},  # without a reference model, an update takes less time
}
LEARN = group_learning.LEARN | {"at_once": 32, "max_ready_rows": 768, "timeout_s": 120.0, "params": {"max_tokens": 24}}


def task(seed: int) -> dict[str, Any]:
    """Return a task: put a thing somewhere in a small bathroom."""
    return {"seed": seed, "kind": PICK, "most": MOST, "room": ROOM}


def recipe() -> Recipe:
    """Return the recipe: walks through houses."""
    return Recipe(
        demonstrations=[_walk(DEMONSTRATED + n, SHORT if n < FEW * BATCH else LONG) for n in range(STEPS * BATCH)],
        teaches="to go about, open, take and put down",
        vocabulary=900,
        context=1536,
        steps=STEPS,
        batch=BATCH,
    )


def _walk(seed: int, steps: int) -> Demonstration:
    """Return an episode: possible actions at random, and sometimes the next action of the task's plan."""
    draw, house = random.Random(seed), SmallHouse(make_house(**task(seed)))
    messages: list[dict[str, Any]] = [{"role": "system", "content": RULES}]
    observation = house.intro()
    for _ in range(steps):
        if draw.random() < REFUSED:
            messages += [
                {"role": "user", "content": observation},
                {"role": "assistant", "content": f"<action>{_mistake(draw, house)}</action>", "learn": False},
            ]
            observation = NOTHING
        action = house.next_of_plan() if draw.random() < SHARE else _choose(draw, house)
        messages += [
            {"role": "user", "content": observation},
            {"role": "assistant", "content": f"<action>{action}</action>"},
        ]
        observation = house.do(action)
        if house.is_done():
            break
    return Demonstration(messages)


def _choose(draw: random.Random, house: SmallHouse) -> str:
    """Choose an action: most often one that is possible here, else moving to another place."""
    here = house.possible_here()
    if here and draw.random() < 0.6:
        return draw.choice(here)
    return f"go to {draw.choice([one for one in house.furniture if one != house.place])}"


def _mistake(draw: random.Random, house: SmallHouse) -> str:
    """Choose an action that is not possible here."""
    thing, place = draw.choice(sorted(house.lying) or [house.held]), draw.choice(house.furniture)
    tried = [f"take {thing} from {place}", f"move {thing} to {place}", f"open {place}", f"go to {house.place}"]
    return draw.choice([one for one in tried[: None if house.place else -1] if one not in house.possible_here()])


class SmallHouse:
    """A house of the tiny model's tasks with ALFWorld's wording but not its engine, to make demonstrations in seconds.

    It supports go, open, take and move. A test compares its wording with the game's.
    """

    def __init__(self, house: House) -> None:
        furniture, things = _named(list(house.receptacles)), _named(list(house.objects))
        self.furniture = list(furniture.values())
        self.lying = {things[name]: furniture[holder] for name, holder in sorted(house.objects.items())}
        self.closed = {name for name in self.furniture if name.split()[0].capitalize() in constants.OPENABLE_CLASS_SET}
        self.openable = frozenset(self.closed)
        self.place, self.held = "", ""
        self._house = house
        self._order = list(things.values())

    def intro(self) -> str:
        """Return the first observation."""
        seen = _list(self.furniture)
        goal = f"Your task is to: {self._house.goal}."
        return f"You are in the middle of a room. Looking quickly around you, you see {seen}.\n{goal}"

    def possible_here(self) -> list[str]:
        """Return the possible actions at the current place, on the furniture or on a thing."""
        if not self.place:
            return []
        if self.place in self.closed:
            return [f"open {self.place}"]
        if self.held:
            return [f"move {self.held} to {self.place}"] if self._may_lie(self.held) else []
        return [f"take {name} from {self.place}" for name in self._here()]

    def do(self, action: str) -> str:
        """Do a possible action. Returns the observation."""
        verb, rest = action.split(maxsplit=1)
        if verb == "go":
            self.place = rest.removeprefix("to ")
            return f"You arrive at {self.place}. {self._look()}"
        if verb == "open":
            self.closed.remove(rest)
            return f"You open the {rest}. {self._look()}"
        if verb == "take":
            self.held = rest.partition(" from ")[0]
            del self.lying[self.held]
            return f"You pick up the {self.held} from the {self.place}."
        name, self.held = self.held, ""
        self.lying[name] = self.place
        return f"You move the {name} to the {self.place}."

    def next_of_plan(self) -> str:
        """Return the next action that serves the task."""
        wanted, target = self._house.wanted.lower(), self._house.target.lower()
        if self.held and self.held.split()[0] != wanted:
            return self.possible_here()[0] if self.possible_here() else self._go(self._fitting(self.held))
        lies = next((place for name, place in self.lying.items() if name.split()[0] == wanted), "")
        goal = target if self.held else lies
        if self.place.startswith(goal):
            here = self.possible_here()
            return next((one for one in here if one.startswith(f"take {wanted} ")), here[0])
        return self._go([one for one in self.furniture if one.startswith(goal)])

    def is_done(self) -> bool:
        """Whether a wanted thing is where it should be."""
        wanted, target = self._house.wanted.lower(), self._house.target.lower()
        return any((name.split()[0], at.split()[0]) == (wanted, target) for name, at in self.lying.items())

    def _go(self, places: list[str]) -> str:
        return f"go to {places[0]}"

    def _fitting(self, thing: str) -> list[str]:
        return [one for one in self.furniture if self._may_lie(thing, one)]

    def _may_lie(self, thing: str, place: str = "") -> bool:
        kinds = {one.lower(): one for one in (*_types(self._house), *pickable())}
        holder = kinds[(place or self.place).split()[0]]
        return kinds[thing.split()[0]] in may_hold(holder)

    def _here(self) -> list[str]:
        return [name for name in self._order if self.lying.get(name) == self.place]

    def _look(self) -> str:
        if self.place in self.closed:
            return f"The {self.place} is closed."
        if self.place in self.openable:
            return f"The {self.place} is open. In it, you see {_list(self._here())}."
        return f"On the {self.place}, you see {_list(self._here())}."


def _types(house: House) -> set[str]:
    return {type_of(name) for name in house.receptacles}


def _named(ids: list[str]) -> dict[str, str]:
    """Return names by id. Of each type the last id gets number 1."""
    left, found = Counter(type_of(one) for one in ids), {}
    for one in sorted(ids, key=mangled):
        kind = type_of(one)
        found[one] = f"{kind.lower()} {left[kind]}"
        left[kind] -= 1
    return found


def _list(names: list[str]) -> str:
    listed = [f"a {name}" for name in names]
    return ", ".join([*listed[:-1], f"and {listed[-1]}"]) if len(listed) > 1 else "".join(listed) or "nothing"
