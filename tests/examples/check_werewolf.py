"""Werewolf beside a second rule engine, under fuzzed answers, and where a reward could be had for nothing."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys
from argparse import Namespace
from collections import Counter

import flywheel
import pytest

from examples.werewolf.__main__ import example
from examples.werewolf.agent import RULES, play
from examples.werewolf.reward import outcome, reward
from examples.werewolf.world import MOST_DAYS, NAMES, Game, read_name, role, villager
from tests.examples.loop import in_a_loop
from tests.examples.stub import longest_prompt, stub

PIECES = [*NAMES, *NAMES, "nobody", "", "\x00", "é", "{", "ada", "Ben, Ben", "<name>", " ", "Wolf 1"]


def at_random(draw: random.Random):
    return lambda game, name: draw.choice([other for other in game.alive if other != name])


def at_villagers(draw: random.Random):
    """Wolves that work together: both name the first living villager."""
    return lambda game, name: next(other for other in game.alive if other not in game.wolves)


def drive(seed: int, wolf, by_day=villager) -> tuple[Game, list[dict[str, str]]]:
    """A game, and the answers of each of its rounds."""
    game, rounds = Game(seed), []
    while names := game.turn():
        rounds.append({name: (wolf if name in game.wolves else by_day)(game, name) for name in names})
        game.take(rounds[-1])
    return game, rounds


def wins(wolf, games: int = 300) -> float:
    return sum(drive(seed, wolf)[0].winner == "wolves" for seed in range(games)) / games


def referee(seats: list[str], wolves: frozenset[str], rounds: list[dict[str, str]]) -> dict[str, dict[str, float]]:
    """The rules again, from the seats and the raw answers alone: what each player has earned, by part."""
    living, kills, hanged, spoke, waiting, day = list(seats), [], [], {}, list(rounds), 0
    won = None

    def over() -> str | None:
        evil = len([name for name in living if name in wolves])
        return "villagers" if evil == 0 else "wolves" if evil >= len(living) - evil else None

    def choice(speaker: str, text: str) -> str | None:
        found = [name for name in NAMES if re.search(rf"(?<![A-Za-z]){name}(?![A-Za-z])", text)]
        return found[0] if len(found) == 1 and found[0] in living and found[0] != speaker else None

    while won is None and day < MOST_DAYS:
        day += 1
        asked = waiting.pop(0)
        named = [found for name in seats if name in asked and (found := choice(name, asked[name]))]
        if named:
            victim = max(named, key=lambda one: (named.count(one), -named.index(one)))
            living.remove(victim)
            kills.append(victim)
        if won := over():
            break
        accused = {}
        for name in list(living):
            asked = waiting.pop(0)
            assert set(asked) == {name}
            accused[name] = choice(name, asked[name])
        votes = {name: choice(name, text) for name, text in waiting.pop(0).items()}
        assert set(votes) == set(living)
        ranking = Counter(one for one in votes.values() if one).most_common()
        if ranking and (len(ranking) == 1 or ranking[0][1] > ranking[1][1]):
            out = ranking[0][0]
            living.remove(out)
            hanged.append(out)
            for name in accused:
                if accused[name] == votes[name] == out and (out in wolves) != (name in wolves):
                    spoke[name] = 1.0
        won = over()
    assert not waiting
    return {name: earned(name, name in wolves, won or "villagers", living, hanged, spoke) for name in seats}


def earned(
    name: str, is_wolf: bool, won: str, living: list[str], hanged: list[str], spoke: dict[str, float]
) -> dict[str, float]:
    side, part = ("wolves", "blame") if is_wolf else ("villagers", "found")
    found = {"team_win": float(won == side), "survive": float(name in living), part: spoke.get(name, 0.0)}
    return {**found, "exposed": float(name in hanged)} if is_wolf else found


WEIGHTS = {"team_win": 1.0, "survive": 0.5, "blame": 0.2, "found": 0.2, "exposed": -0.5}


def check(game: Game, rounds: list[dict[str, str]]) -> None:
    expected = referee(game.seats, game.wolves, rounds)
    for name in game.seats:
        found = reward(game, name)
        assert found.metrics == expected[name]
        assert found.value == pytest.approx(sum(WEIGHTS[part] * value for part, value in expected[name].items()))


def test_rewards_are_those_of_a_second_rule_engine():
    winners = Counter()
    for seed in range(400):
        draw = random.Random(seed)
        game, rounds = drive(seed, (at_random if seed % 2 else at_villagers)(draw))
        check(game, rounds)
        winners[game.winner] += 1
    assert min(winners.values()) > 50


def test_a_thousand_fuzzed_answers_end_and_earn_what_the_rules_say():
    answers = 0
    for seed in range(60):
        draw = random.Random(seed)
        fuzz = lambda *_, draw=draw: " ".join(draw.choices(PIECES, k=draw.randint(0, 2)))  # noqa: E731
        game, rounds = drive(seed, fuzz, fuzz)
        check(game, rounds)
        assert game.day <= MOST_DAYS
        again = Game(seed)
        told = [again.tell(name) for name in again.turn()]
        for one in rounds:
            again.take(one)
            told += [again.tell(name) for name in again.turn()]
        assert (again.said, again.deaths, again.winner) == (game.said, game.deaths, game.winner)
        assert all(isinstance(text, str) and len(text) < 400 for text in told)
        answers += sum(len(one) for one in rounds)
    assert answers > 1000


def test_games_are_made_from_their_seeds_and_differ():
    games = [drive(seed, at_random(random.Random(seed)))[0] for seed in range(50)]
    assert games == [drive(seed, at_random(random.Random(seed)))[0] for seed in range(50)]
    assert len({tuple(Game(seed).seats) for seed in range(300)}) > 200


def test_wolves_that_work_together_win_more_than_wolves_at_random():
    assert 0.35 < wins(at_random(random.Random(1))) < 0.6
    assert wins(at_villagers(random.Random(1))) > wins(at_random(random.Random(1))) + 0.25


@pytest.mark.parametrize(
    ("wolf", "most"),
    [
        (lambda game, name: "", 0.0),  # wolves that never speak
        (lambda game, name: next(x for x in game.alive if x not in game.wolves) if game.phase == "night" else "", 0.05),
        (lambda game, name: " ".join(game.alive), 0.0),  # all names at once
        (lambda game, name: name, 0.0),  # themselves
        (lambda game, name: game.tell(name), 0.0),  # the question quoted
        (lambda game, name: next((d.name for d in game.deaths), ""), 0.0),  # the dead
    ],
)
def test_next_to_nothing_is_won_by(wolf, most):
    assert wins(wolf) <= most


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (["--villagers", "agent@0"], "a version needs --url"),
        (["--villagers", "agent", "--self-play"], "not with --self-play"),
    ],
)
def test_villagers_that_cannot_play_are_refused(said, expected):
    command = [sys.executable, "-m", "examples.werewolf", *said]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (found.returncode, expected in found.stderr) == (2, True), found.stderr


def test_a_game_in_which_nobody_ever_speaks_ends_and_the_villagers_win_it():
    game, rounds = drive(3, lambda *_: "", lambda *_: "")
    assert (game.day, game.winner, game.deaths) == (MOST_DAYS, "villagers", [])
    check(game, rounds)
    assert outcome(game).metrics["wins"] == 0.0
    assert outcome(game).value == 0.5, "waiting keeps a wolf alive, and earns less than a win"


def test_a_name_counts_when_it_is_the_only_one_and_alive():
    assert read_name("I accuse Tom. Tom!", ["Tom", "Ada"], "Ada") == "Tom"
    assert read_name("Tom or Ada", ["Tom", "Ada"], "Ben") is None
    assert read_name("Tommy", ["Tom", "Ada"], "Ada") is None
    assert read_name("Ada", ["Tom", "Ada"], "Ada") is None


def test_what_a_villager_is_told_names_no_wolf_but_those_that_died():
    for seed in range(60):
        game = Game(seed)
        while names := game.turn():
            dead = {death.name for death in game.deaths}
            for name in set(names) - game.wolves:
                assert set(re.findall(r"(\w+) is dead, a wolf", game.tell(name))) <= dead & game.wolves
                assert "wolf" not in role(game, name)
            game.take({name: villager(game, name) for name in names})


@in_a_loop
async def test_agents_play_a_game_to_its_end_and_their_prompts_fit_a_small_context():
    def wolf(body: dict) -> dict:
        told = "".join(part["text"] for part in body["messages"][-1]["content"])
        me, other = re.search(r"You are (\w+), a wolf. (\w+) is", body["messages"][0]["content"][0]["text"]).groups()
        alive = re.search(r"Alive: ([\w ]+)\.", told)[1].split()
        return {"content": next(name for name in alive if name not in (me, other))}

    with stub(wolf) as (url, bodies):
        model = flywheel.Model.of(url, "agent", key="unused")
        for seed in range(4):
            game = await play(seed, dict.fromkeys(Game(seed).wolves, model))
            check(game, drive(seed, at_villagers(random.Random()))[1])
            assert game.said == drive(seed, at_villagers(random.Random()))[0].said
    assert longest_prompt(bodies) < 8000
    first = next(body for body in bodies if len(body["messages"]) > 4)
    earlier = [body["messages"] for body in bodies if body["messages"][0] == first["messages"][0]]
    assert all(short == long[: len(short)] for short, long in itertools.pairwise(earlier)), "chats continue"
    assert RULES in first["messages"][0]["content"][0]["text"]


def settings(**options) -> Namespace:
    return Namespace(**{"url": "http://127.0.0.1:9", "villagers": None, "self_play": False, **options})


def first_alive(body: dict) -> dict:
    """The first living player but the one who is asked."""
    me = re.search(r"You are (\w+), a", body["messages"][0]["content"][0]["text"])[1]
    told = "".join(part["text"] for part in body["messages"][-1]["content"])
    return {"content": next(name for name in re.search(r"Alive: ([\w ]+)\.", told)[1].split() if name != me)}


def players(bodies: list[dict]) -> dict[str, tuple[str, bool]]:
    """The model of each player that was asked, and whether its chats are recorded."""
    found = {}
    for body in bodies:
        name = re.search(r"You are (\w+), a", body["messages"][0]["content"][0]["text"])[1]
        found[name] = (body["model"], body.get("store") is not False)
    return found


@in_a_loop
async def test_villagers_may_be_a_version_whose_chats_are_not_recorded():
    game = Game(5)
    with stub(first_alive) as (url, bodies):
        client = flywheel.AsyncClient(url.removesuffix("/v1"), model="agent", key="unused")
        run = client.run("t", "0")
        _, runs = await example(settings(villagers="agent@0")).workflow({"seed": 5}, run.model, run)
    asked = players(bodies)
    assert {name for name, said in asked.items() if said == ("agent", True)} == game.wolves == set(runs)
    others = {name for name, said in asked.items() if said == ("agent@0", False)}
    assert others < set(game.seats) - game.wolves and len(others) == 3, "one is killed before he speaks"
    assert {one.run_id for one in runs.values()} == {f"0/{name}" for name in game.wolves}


@in_a_loop
async def test_in_self_play_the_sides_learn_in_turn_and_each_is_rewarded_for_its_own_part(monkeypatch):
    monkeypatch.setattr("examples.werewolf.__main__.TURN", 1)
    made = example(settings(self_play=True))
    for side in ("wolves", "villagers"):
        with stub(first_alive) as (url, bodies):
            run = flywheel.AsyncClient(url.removesuffix("/v1"), model="agent", key="unused").run("t", "0")
            reply = await made.workflow({"seed": 5}, run.model, run)
        game, runs = reply
        assert {name in game.wolves for name in runs} == {side == "wolves"}
        spoke = {name for name, (_, recorded) in players(bodies).items() if recorded}
        assert made.judge({"seed": 5}, reply).metrics == outcome(game).metrics
        assert {name: one.outcome for name, one in runs.items() if name in spoke} == {
            name: reward(game, name) for name in spoke
        }
        assert [one.outcome for name, one in runs.items() if name not in spoke] == [None] * (side == "villagers")
        assert made.parts(reply) == [one for name, one in runs.items() if name in spoke]


@in_a_loop
async def test_agents_that_say_nothing_or_never_stop_lose():
    for text in ("", "Tom " * 500, " ".join(NAMES)):
        with stub(lambda _, text=text: {"content": text}) as (url, bodies):
            model = flywheel.Model.of(url, "agent", key="unused")
            games = [await play(seed, dict.fromkeys(Game(seed).wolves, model)) for seed in range(3)]
        assert all(len(game.alive) < 6 or game.day == MOST_DAYS for game in games)
        assert [game.winner for game in games].count("wolves") <= (1 if "Tom" in text else 0)
        assert len(bodies) <= 3 * 2 * 3 * MOST_DAYS
