"""Werewolf for six players as text: two wolves, four villagers, nights, accusations and votes.

A seed defines a game. At night each wolf names a victim. By day the living accuse in the order of their seats, and then
vote at the same time. An answer counts if it names exactly one living player other than its speaker; any other answer
is silence. The wolves win when they are at least as many as the villagers. The villagers win when both wolves are dead,
or after MOST_DAYS days: every game ends, and nobody gains by waiting.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

NAMES = ("Ada", "Ben", "Eva", "Leo", "Mia", "Tom")
WOLVES = 2
MOST_DAYS = 6
NIGHT, ACCUSE, VOTE, OVER = "night", "accuse", "vote", "over"
# terms of a scripted villager's suspicion, added to a random number between 0 and 1
SENSE, LEANING, SILENT, ALONE, AGAINST_VILLAGER, AGAINST_WOLF = 0.15, 0.2, 1.0, 0.3, 0.1, -0.6
_WORD = re.compile(r"[A-Za-z]+")


class Said(NamedTuple):
    """One answer: the name that it chose, or None."""

    day: int
    phase: str
    speaker: str
    choice: str | None


class Death(NamedTuple):
    """A death: the player, and the phase and day."""

    day: int
    phase: str
    name: str


@dataclass
class Game:
    """One game. `turn` returns the players who answer now, `tell` a player's prompt; `take` processes the answers."""

    seed: int
    seats: list[str] = field(init=False)
    wolves: frozenset[str] = field(init=False)
    day: int = field(init=False, default=1)
    phase: str = field(init=False, default=NIGHT)
    said: list[Said] = field(init=False, default_factory=list)
    deaths: list[Death] = field(init=False, default_factory=list)
    winner: str | None = field(init=False, default=None)  # "wolves" or "villagers"

    def __post_init__(self) -> None:
        draw = random.Random(f"werewolf {self.seed}")
        self.seats = draw.sample(NAMES, len(NAMES))
        self.wolves = frozenset(draw.sample(self.seats, WOLVES))

    @property
    def alive(self) -> list[str]:
        """The living players, in the order of their seats."""
        dead = {death.name for death in self.deaths}
        return [name for name in self.seats if name not in dead]

    def today(self, phase: str) -> list[Said]:
        """Return the answers of this phase today."""
        return [one for one in self.said if (one.day, one.phase) == (self.day, phase)]

    def turn(self) -> list[str]:
        """Return the players who answer now: all wolves, the next accuser, or all voters."""
        if self.phase == NIGHT:
            return [name for name in self.alive if name in self.wolves]
        if self.phase == ACCUSE:
            return [self.alive[len(self.today(ACCUSE))]]
        return self.alive if self.phase == VOTE else []

    def take(self, answers: Mapping[str, str]) -> None:
        """Process the answers of the players in `turn`. A missing answer is silence."""
        for name in self.turn():
            choice = read_name(answers.get(name, ""), self.alive, name)
            self.said.append(Said(self.day, self.phase, name, choice))
        if self.phase == ACCUSE:
            if len(self.today(ACCUSE)) == len(self.alive):
                self.phase = VOTE
            return
        chosen = most_named([one.choice for one in self.today(self.phase)], first_wins=self.phase == NIGHT)
        if chosen is not None:
            self.deaths.append(Death(self.day, self.phase, chosen))
        self._go_on()

    def _go_on(self) -> None:
        wolves = sum(name in self.wolves for name in self.alive)
        if wolves and 2 * wolves >= len(self.alive):
            self.phase, self.winner = OVER, "wolves"
        elif wolves == 0 or (self.phase == VOTE and self.day == MOST_DAYS):
            self.phase, self.winner = OVER, "villagers"
        elif self.phase == NIGHT:
            self.phase = ACCUSE
        else:
            self.phase, self.day = NIGHT, self.day + 1

    def tell(self, name: str) -> str:
        """Return a player's prompt. All of it is public except the question at night."""
        alive = f"Alive: {' '.join(self.alive)}."
        if self.phase == NIGHT:
            return f"Night {self.day}. {self._news(VOTE, self.day - 1)}{alive} Whom do you kill?"
        heard = " ".join(f"{one.speaker} accuses {one.choice or 'nobody'}." for one in self.today(ACCUSE))
        if self.phase == ACCUSE:
            return f"Day {self.day}. {self._news(NIGHT, self.day)}{alive} {heard} Whom do you accuse?"
        return f"{heard} {alive} Whom do you vote for?"

    def _news(self, phase: str, day: int) -> str:
        if day == 0:
            return ""
        for death in self.deaths:
            if (death.day, death.phase) == (day, phase):
                return f"{death.name} is dead, a {'wolf' if death.name in self.wolves else 'villager'}. "
        return "Nobody died. "


def role(game: Game, name: str) -> str:
    """Return the role that a player is told."""
    if name not in game.wolves:
        return f"You are {name}, a villager."
    (other,) = game.wolves - {name}
    return f"You are {name}, a wolf. {other} is the other wolf."


def read_name(answer: str, alive: list[str], speaker: str) -> str | None:
    """Return the one living player other than the speaker whom an answer names, or None if it is not exactly one."""
    named = {word for word in _WORD.findall(answer) if word in NAMES}
    return next(iter(named)) if len(named) == 1 and named <= set(alive) - {speaker} else None


def most_named(choices: list[str | None], *, first_wins: bool) -> str | None:
    """Return the player named most often. In a tie, the first one named if first_wins, else None."""
    counts = Counter(choice for choice in choices if choice is not None)
    if not counts:
        return None
    most = [name for name, count in counts.items() if count == max(counts.values())]
    return most[0] if first_wins or len(most) == 1 else None


def villager(game: Game, name: str) -> str:
    """Return a scripted villager's answer by day: the player with the highest suspicion.

    The suspicion is a random number from the seed, plus SENSE for wolves. It grows for players who were silent, who
    accused a player whom nobody else accused, or who spoke against a player found a villager. It falls for players
    who spoke against a wolf. It also grows by LEANING each time the player is named today.
    """
    dead = {death.name for death in game.deaths}
    by_day = [one for one in game.said if one.phase != NIGHT]
    accusers = Counter((one.day, one.choice) for one in by_day if one.phase == ACCUSE)
    draw = random.Random(f"{game.seed} {game.day} {game.phase} {name}")
    suspicion = {other: draw.random() + SENSE * (other in game.wolves) for other in game.alive if other != name}
    for one in by_day:
        if one.speaker in suspicion:
            suspicion[one.speaker] += _distrust(game, one, dead, accusers)
        if one.choice in suspicion and one.day == game.day:
            suspicion[one.choice] += LEANING
    return max(suspicion, key=lambda other: suspicion[other])


def _distrust(game: Game, said: Said, dead: set[str], accusers: Counter[tuple[int, str | None]]) -> float:
    if said.choice is None:
        return SILENT
    found = 0.0
    if said.choice in dead:
        found += AGAINST_WOLF if said.choice in game.wolves else AGAINST_VILLAGER
    is_over = said.day < game.day or game.phase == VOTE
    if said.phase == ACCUSE and is_over and accusers[said.day, said.choice] == 1:
        found += ALONE
    return found
