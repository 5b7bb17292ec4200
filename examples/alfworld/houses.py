"""ALFWorld games generated from the files in its wheel: floor plans, domain, grammar and goal templates.

A house has the receptacles of one floor plan, at their locations. Objects of that plan are placed at random where
ALFWorld's table allows. The one or two objects that the goal asks for are not placed where the goal wants them. Seen
houses use ALFWorld's training plans, unseen houses its test plans.

    python -m examples.alfworld.houses FOLDER [COUNT]      writes games that ALFWorld's AlfredTWEnv can read
"""

from __future__ import annotations

import functools
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import alfworld
from alfworld.gen import constants, goal_library

PICK, LIGHT, TWO = "pick_and_place_simple", "look_at_obj_in_light", "pick_two_obj_and_place"
CLEAN, HEAT, COOL = "pick_clean_then_place_in_recep", "pick_heat_then_place_in_recep", "pick_cool_then_place_in_recep"
KINDS = (PICK, LIGHT, CLEAN, HEAT, COOL, TWO)
STATIONS = {CLEAN: ("SinkBasin", "Cleanable"), HEAT: ("Microwave", "Heatable"), COOL: ("Fridge", "Coolable")}
SURFACES = {"SideTable", "Desk", "Dresser", "CoffeeTable", "DiningTable", "TVStand", "Shelf", "CounterTop"}  # for lamps
ROOMS = {"Kitchen": 0, "LivingRoom": 200, "Bedroom": 300, "Bathroom": 400}
FEWEST = 3  # receptacles in a house
NOTHING = "Nothing happens."  # the reply to an impossible action
_HERE = Path(alfworld.__file__).parent
_MANGLED = {"|": "_bar_", "+": "_plus_", "-": "_minus_", ".": "_dot_", ",": "_comma_"}


@dataclass(frozen=True)
class Plan:
    """A floor plan: its receptacles by id, with the location from which each is reached, and its types of objects."""

    number: int
    receptacles: Mapping[str, tuple[int, ...]]
    types: tuple[str, ...]


@functools.cache
def plan(number: int) -> Plan:
    """Return the floor plan with this number."""
    stem = _HERE / "gen" / "layouts" / f"FloorPlan{number}"
    places = json.loads(stem.with_name(f"{stem.name}-openable.json").read_text())
    types = json.loads(stem.with_name(f"{stem.name}-objects.json").read_text())
    known = {name: tuple(round(4 * x) for x in at) for name, at in sorted(places.items()) if may_hold(type_of(name))}
    return Plan(number, known, tuple(sorted(set(types) & pickable())))


def type_of(name: str) -> str:
    """Return the type of an object or receptacle from its id."""
    first, *_, last = name.split("|")
    return f"{first}Basin" if last.endswith("Basin") else first  # one bathtub's id ends in SinkBasin


def may_hold(kind: str) -> set[str]:
    """Return the types of objects that a type of receptacle may hold."""
    return set(constants.VAL_RECEPTACLE_OBJECTS.get(kind, ())) & pickable()


@functools.cache
def pickable() -> frozenset[str]:
    """Return the types of objects that can be carried: objects in receptacles, neither sliced nor containers."""
    held = set().union(*constants.VAL_RECEPTACLE_OBJECTS.values())
    return frozenset(one for one in held - constants.MOVABLE_RECEPTACLES_SET if not one.endswith("Sliced"))


@dataclass
class House:
    """One game: its goal and the locations of all objects."""

    kind: str
    wanted: str  # type of the wanted object
    target: str  # type of receptacle; for LIGHT, of the lamp
    plan: int
    receptacles: dict[str, tuple[int, ...]]
    objects: dict[str, str]  # id → id of its receptacle
    goal: str = ""


def make_house(
    seed: int, kind: str | None = None, seen: bool = True, most: int | None = None, room: str | None = None
) -> House:
    """Make the house of this seed. kind: one of KINDS; default: random. most: maximum number of receptacles.

    room: one of ROOMS; default: any room with tasks of this kind.
    """
    draw = random.Random(f"house {seed} {kind} {seen} {most}")
    while True:
        wish = kind or draw.choice(KINDS)
        numbers = constants.TRAIN_SCENE_NUMBERS if seen else constants.TEST_SCENE_NUMBERS
        rooms = {room} if room else constants.GOALS_VALID[wish]
        found = plan(draw.choice([n for n in numbers if room_of(n) in rooms]))
        made = _furnish(draw, wish, found, most)
        if made is not None:
            template = draw.choice(goal_library.gdict[wish]["templates"])
            made.goal = template.format(obj=made.wanted.lower(), recep=made.target.lower(), toggle=made.target.lower())
            return made


def room_of(number: int) -> str:
    """Return the room of a floor plan."""
    return max((room for room, first in ROOMS.items() if number > first), key=lambda room: ROOMS[room])


def _furnish(draw: random.Random, kind: str, of: Plan, most: int | None) -> House | None:
    """Make a house from this plan with this kind of goal. Returns None if the plan or the random draw has none."""
    ids = list(of.receptacles)
    if most is not None and len(ids) > most:
        ids = sorted(draw.sample(ids, draw.randint(FEWEST, most)))
    types = {name: type_of(name) for name in ids}
    station, ability = STATIONS.get(kind, (None, None))
    if station is not None and station not in types.values():
        return None
    able = set(constants.VAL_ACTION_OBJECTS[ability]) if ability else pickable()
    goals = [
        (wanted, target)
        for wanted in of.types
        for target in sorted(set(types.values()))
        if wanted in able and (kind == LIGHT or wanted in may_hold(target)) and _places(wanted, types, (target,))
    ]
    lamps = [lamp for lamp in _lamps(of.number) if kind == LIGHT]
    stands = [name for name in ids if types[name] in SURFACES]
    if not goals or (kind == LIGHT and not (lamps and stands)):
        return None
    wanted, target = draw.choice(goals)
    house = House(kind, wanted, target, of.number, {name: of.receptacles[name] for name in ids}, {})
    if kind == LIGHT:
        house.target = draw.choice(lamps)
        house.objects[_id(draw, house.target)] = draw.choice(stands)
    for _ in range(2 if kind == TWO else 1):
        house.objects[_id(draw, wanted)] = draw.choice(_places(wanted, types, (target,)))
    for _ in range(draw.randint(len(ids) // 2, len(ids))):
        other = draw.choice(of.types)
        if other != wanted and (places := _places(other, types)):
            house.objects[_id(draw, other)] = draw.choice(places)
    return house


def _places(kind: str, types: Mapping[str, str], but: Sequence[str] = ()) -> list[str]:
    return [name for name, holder in types.items() if holder not in but and kind in may_hold(holder)]


@functools.cache
def _lamps(number: int) -> tuple[str, ...]:
    stem = _HERE / "gen" / "layouts" / f"FloorPlan{number}-objects.json"
    return tuple(sorted({"DeskLamp", "FloorLamp"} & set(json.loads(stem.read_text()))))


def _id(draw: random.Random, kind: str) -> str:
    return f"{kind}|" + "|".join(f"{draw.uniform(-9, 9):+06.2f}" for _ in range(3))


def game_of(house: House) -> dict[str, Any]:
    """Return the game in the format of ALFWorld's game.tw-pddl."""
    grammar = (_HERE / "data" / "alfred.twl2").read_text()
    return {
        "pddl_domain": (_HERE / "data" / "alfred.pddl").read_text(),
        "grammar": grammar.replace("UNKNOWN GOAL", house.goal),
        "pddl_problem": problem_of(house),
        "solvable": True,
        "walkthrough": None,
    }


def problem_of(house: House) -> str:
    """Return the house in PDDL."""
    places = sorted({_place(at) for at in house.receptacles.values()} | {"loc|start"})
    carried = sorted({type_of(name) for name in house.objects} | {house.wanted})
    holders = sorted({type_of(name) for name in house.receptacles} | {house.target, "SinkBasin", "Microwave", "Fridge"})
    things = {
        "agent": ["agent1"],
        "location": places,
        "receptacle": list(house.receptacles),
        "object": list(house.objects),
        "otype": [f"{one}Type" for one in sorted({*carried, "Knife", "ButterKnife"})],
        "rtype": [f"{one}Type" for one in holders if one not in constants.VAL_ACTION_OBJECTS["Toggleable"]],
    }
    listed = "\n".join(f"  {mangled(name)} - {kind}" for kind, names in things.items() for name in names)
    facts = "\n".join(f"  ({mangled(' '.join(fact))})" for fact in _facts(house, carried))
    goal = goal_library.gdict[house.kind]["pddl"].replace("#", "-")
    wish = goal.format(obj=house.wanted, recep=house.target, toggle=house.target)
    return (
        f"(define (problem house)\n (:domain alfred)\n (:objects\n{listed}\n )\n"
        f" (:init\n  (= (total-cost) 0)\n{facts}\n )\n{wish}"
    )


def _facts(house: House, carried: Sequence[str]) -> list[tuple[str, ...]]:
    facts: list[tuple[str, ...]] = [("atLocation", "agent1", "loc|start")]
    for name, at in house.receptacles.items():
        kind = type_of(name)
        facts += [("receptacleAtLocation", name, _place(at)), ("receptacleType", name, f"{kind}Type")]
        facts += [("openable", name)] if kind in constants.OPENABLE_CLASS_SET else []
    for holder in sorted({type_of(name) for name in house.receptacles}):
        facts += [("canContain", f"{holder}Type", f"{one}Type") for one in carried if one in may_hold(holder)]
    abilities = {ability.lower(): kinds for ability, kinds in constants.VAL_ACTION_OBJECTS.items()}
    for name, holder in house.objects.items():
        kind = type_of(name)
        facts += [("objectType", name, f"{kind}Type"), ("inReceptacle", name, holder)]
        facts += [("objectAtLocation", name, _place(house.receptacles[holder]))]
        facts += [("pickupable", name)] if kind in pickable() else []
        facts += [(ability, name) for ability, kinds in sorted(abilities.items()) if kind in kinds]
    return facts


def _place(at: Sequence[int]) -> str:
    return "loc|" + "|".join(str(x) for x in at)


def mangled(text: str) -> str:
    """Replace characters that PDDL names cannot contain."""
    for sign, word in _MANGLED.items():
        text = text.replace(sign, word)
    return text


def write(folder: Path, house: House) -> Path:
    """Write game.tw-pddl and traj_data.json to a folder. Returns the path of game.tw-pddl."""
    folder.mkdir(parents=True, exist_ok=True)
    is_light = house.kind == LIGHT
    params = {
        "object_target": house.wanted,
        "parent_target": "" if is_light else house.target,
        "toggle_target": house.target if is_light else "",
        "mrecep_target": "",
        "object_sliced": False,
    }
    told = {"task_type": house.kind, "pddl_params": params, "scene": {"scene_num": house.plan}}
    told["turk_annotations"] = {"anns": [{"task_desc": house.goal}]}
    (folder / "traj_data.json").write_text(json.dumps(told))
    file = folder / "game.tw-pddl"
    file.write_text(json.dumps(game_of(house)))
    return file


if __name__ == "__main__":
    for number in range(int(sys.argv[2]) if len(sys.argv) > 2 else 28):
        write(Path(sys.argv[1]) / f"{number:05}", make_house(number))
