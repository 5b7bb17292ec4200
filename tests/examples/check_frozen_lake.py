"""The lake beside a second rule engine, under fuzzed answers, and where a reward could be had for nothing."""

from __future__ import annotations

import asyncio
import itertools
import random
import re

import flywheel
import pytest

from examples.frozen_lake.__main__ import example
from examples.frozen_lake.agent import agent
from examples.frozen_lake.reward import reward
from examples.frozen_lake.world import MAX_STEPS, MOVES, Lake, distance, make_map, read_move
from tests.examples.stub import longest_prompt, stub

SHIFTS = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}


def walk(lake: list[str], moves: list[str | None]) -> tuple[float, int]:
    """The rules again, from the map's text alone: the reward, and after how many turns it ends."""
    cells = {(r, c): cell for r, line in enumerate(lake) for c, cell in enumerate(line)}
    here = next(place for place, cell in cells.items() if cell == "S")
    for turn, move in enumerate(moves[:MAX_STEPS], 1):
        shift = SHIFTS[move] if move else (0, 0)
        there = (here[0] + shift[0], here[1] + shift[1])
        here = there if there in cells else here
        if cells[here] in "GH":
            return float(cells[here] == "G"), turn
    return 0.0, min(len(moves), MAX_STEPS)


def brute_force(lake: list[str], most: int) -> int:
    """The length of the shortest sequence of moves that ends at the goal, by trying all of them."""
    for length in range(1, most + 1):
        for moves in itertools.product(SHIFTS, repeat=length):
            if walk(lake, list(moves)) == (1.0, length):
                return length
    return -1


def test_distances_are_those_of_trying_all_ways():
    lakes = [make_map(seed) for seed in range(60)]
    for lake in lakes:
        found = distance(lake)
        assert found > 5 or brute_force(lake, 5) == found
    assert distance(["SHG", "HHF", "FFF"]) == brute_force(["SHG", "HHF", "FFF"], 4) == -1


def test_lakes_are_made_from_a_seed_and_can_be_solved():
    assert [make_map(seed) for seed in range(300)] == [make_map(seed) for seed in range(300)]
    assert all(1 <= distance(make_map(seed)) <= MAX_STEPS for seed in range(300))
    assert len({"".join(make_map(seed)) for seed in range(300)}) > 290


def test_no_lake_of_an_evaluation_is_learned_from():
    found = example()
    lakes, held_out = ({tuple(make_map(**task)) for task in tasks} for tasks in (found.tasks, found.held_out))
    assert not lakes & held_out and len(found.held_out) == 200


def test_a_thousand_fuzzed_answers_end_and_earn_what_the_rules_say():
    draw = random.Random(7)
    pieces = [
        *(f"```{move}```" for move in MOVES),
        "```",
        "Up",
        "``` down ```",
        "\x00",
        "é",
        "```Jump```",
        " ",
        "\n",
        "{",
    ]
    answers = 0
    for seed in itertools.count():
        lake, said, told, ended, total = Lake(seed), [], [], False, 0.0
        told.append(lake.reset()[0])
        while not ended:
            said.append("".join(draw.choices(pieces, k=draw.randint(0, 4))))
            observation, earned, terminated, truncated, _ = lake.step(said[-1])
            told.append(observation)
            total, ended = total + earned, terminated or truncated
        moves = [read_move(one) for one in said]
        assert (total, len(said)) == walk(lake.map, moves)
        again = Lake(seed)
        assert told == [again.reset()[0], *(again.step(one)[0] for one in said)]
        answers += len(said)
        if answers > 1000:
            return


def test_the_map_that_is_told_is_the_map_that_is_walked_on():
    lake = Lake(5)
    observation, _ = lake.reset()
    shown = [line.split() for line in observation.splitlines()[:4]]
    cells = [[{"S": "P", "F": "_", "H": "O", "G": "G"}[cell] for cell in line] for line in lake.map]
    assert shown == cells


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("", "empty answers move nothing"),
        ("Up Down Left Right", "moves without backquotes are none"),
        ("```Goal```", "the goal is no move"),
        ("P P P P\nG", "a map of one's own is no move"),
    ],
)
def test_nothing_is_earned_by(answer, why):
    for seed in range(20):
        lake = Lake(seed)
        lake.reset()
        turns = [lake.step(answer) for _ in range(MAX_STEPS)]
        assert sum(turn[1] for turn in turns) == 0, why
        assert turns[-1][3], "it ends"


def test_of_several_moves_in_an_answer_the_last_one_counts():
    assert read_move("```Up``` or ```down```") == "Down"
    assert read_move("```Down``` or ```jump```") is None


def test_walking_against_the_edge_for_ever_ends():
    lake = Lake(next(seed for seed in range(100) if make_map(seed)[0].startswith("S")))
    lake.reset()
    assert [lake.step("```Up```")[3] for _ in range(MAX_STEPS)] == [False] * (MAX_STEPS - 1) + [True]


def test_the_agent_walks_to_the_goal_and_its_prompts_fit_a_small_context():
    def towards(body: dict) -> dict:
        ways = re.search(r"Goal: (.*?)\.", body["messages"][-1]["content"])[1]
        return {"content": f"I go ```{ways.split(', ')[0].split()[1].capitalize()}```."}

    seed = next(seed for seed in range(100) if "H" not in "".join(make_map(seed)) and distance(make_map(seed)) > 3)
    with stub(towards) as (url, bodies):
        played = asyncio.run(agent({"seed": seed}, flywheel.Model.of(url, "agent", key="unused")))
    assert reward(played).value == 1.0
    assert reward(played).metrics == {"success": 1.0, "turns": float(distance(make_map(seed))), "valid": 1.0}
    assert longest_prompt(bodies) < 4096
