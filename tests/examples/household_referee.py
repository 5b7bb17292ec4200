"""A second reading of ALFWorld's rules, for the tests: from a house as it was made and the words of its game alone."""

from __future__ import annotations

import re
from collections import Counter

from examples.alfworld.houses import CLEAN, COOL, HEAT, LIGHT, TWO, House, mangled

DONE = {CLEAN: "clean", HEAT: "heat", COOL: "cool"}


class Referee:
    """Whether the goal is reached, by a house as it was made and the sentences of its game alone."""

    def __init__(self, house: House, seen: str) -> None:
        self.house, self.held, self.lamp_at, self.at = house, None, None, None
        self.places = named(house.receptacles)
        self.wanted, self.target = house.wanted.lower(), house.target.lower()
        self.where: dict[str, str] = {}
        self.done: dict[str, set[str]] = {}
        self.won = False

    def hear(self, command: str, told: str) -> None:
        if found := re.match(r"You arrive at (.+?)\. ", told):
            self.at = self.places[found[1]]
        elif found := re.fullmatch(r"You pick up the (.+) from the .+\.", told):
            self.held = found[1]
            self.where.pop(self.held, None)
        elif found := re.fullmatch(r"You move the (.+) to the (.+)\.", told):
            assert found[1] == self.held
            self.where[found[1]], self.held = found[2], None
        elif found := re.fullmatch(r"You (heat|cool|clean) the (.+) using the (.+)\.", told):
            assert found[2] == self.held and command == f"{found[1]} {found[2]} with {found[3]}"
            done = self.done.setdefault(found[2], set())
            done -= {"heat", "cool"} if found[1] != "clean" else set()
            done.add(found[1])
        elif told.startswith("You turn on the ") and told[16:].split()[0] == self.target:
            self.lamp_at = self.at
        self.won = self.won or self._reached()

    def _reached(self) -> bool:
        kind = self.house.kind
        if kind == LIGHT:
            return self.at == self.lamp_at is not None and self._is_wanted(self.held)
        there = [
            (name, place)
            for name, place in self.where.items()
            if self._is_wanted(name) and place.split()[0] == self.target
        ]
        if kind == TWO:
            return any(count >= 2 for count in Counter(place for _, place in there).values())
        return any(kind not in DONE or DONE[kind] in self.done.get(name, ()) for name, _ in there)

    def _is_wanted(self, name: str | None) -> bool:
        return name is not None and name.split()[0] == self.wanted


def named(receptacles: dict) -> dict:
    """Places by the names that the game gives: of each type the last id, in the order of its mangled text, is 1."""
    found, numbers = {}, Counter()
    for name in sorted(receptacles, key=mangled, reverse=True):
        kind = name.split("|")[0].lower() + ("basin" if name.endswith("Basin") else "")
        numbers[kind] += 1
        found[f"{kind} {numbers[kind]}"] = receptacles[name]
    return found
