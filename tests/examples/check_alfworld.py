"""ALFWorld's games: solved by its planner, judged by a second reading of the rules, and under fuzzed answers."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import subprocess
import sys

import flywheel
import pytest

pytest.importorskip("alfworld", reason="make examples could not build ALFWorld's planner here")

from examples.alfworld import tiny
from examples.alfworld.agent import RULES, Agent
from examples.alfworld.houses import CLEAN, KINDS, LIGHT, PICK, TWO, House, make_house, plan, room_of, write
from examples.alfworld.reward import reward
from examples.alfworld.world import MAX_STEPS, UNFINISHED, Household, downloaded, read_action
from tests.examples.household_referee import Referee
from tests.examples.stub import longest_prompt, stub
from tests.support.forms import FULL

SMALL = {"kind": PICK, "most": 5}


@functools.cache
def _made(plans: bool) -> Household:
    return Household({"seed": 0, **SMALL}, plans=plans)


@pytest.fixture
def household():
    """A household with a task; the same one for all tests."""

    def load(task: dict, plans: bool = False) -> Household:
        house = _made(plans)
        house.load(task)
        return house

    return load


def tag(action: str) -> str:
    return f"<action>{action}</action>"


PLAIN = """
import json, sys
task, said = map(json.loads, sys.argv[1:])  # first: the planner's modules change sys.argv
from examples.alfworld import world
world._keep_parses = lambda: None
house = world.Household(task)
told = [house.reset()[0]]
for action in said:
    told += [(answer := house.step(action))[0], answer[-1]["possible"]]
print(json.dumps(told))
"""


def test_a_game_whose_parses_are_kept_says_what_textworld_as_it_is_says(household):
    task = {"seed": 4, "kind": CLEAN, "most": 6}
    draw, made, house = random.Random(4), make_house(**task), household(task)
    told, info = house.reset()
    log, said = [told], []
    for _ in range(15):
        said.append(fuzzed(draw, info["possible"], made))
        told, _, _, _, info = house.step(said[-1])
        log += [told, info["possible"]]
    command = [sys.executable, "-c", PLAIN, json.dumps(task), json.dumps(said)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert json.loads(ended.stdout.splitlines()[-1]) == log


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_planner_solves_every_kind_of_task_and_the_referee_agrees(kind, seen, household):
    for seed in range(5 if FULL else 1):  # the short form has few and small houses
        task = {"seed": seed, "kind": kind, "seen": seen, "most": None if FULL else 9}
        house = household(task, plans=True)
        told, info = house.reset()
        made = make_house(**task)
        assert made.goal in told and made.kind == kind
        referee, earned, ended = Referee(made, told), 0.0, False
        while not ended:
            assert not referee.won and info["plan"], "as long as it is not reached, there is a way"
            command = info["plan"][0]
            told, reward, won, cut, info = house.step(tag(command))
            referee.hear(command, told)
            earned, ended = earned + reward, won or cut
        assert (won, earned, referee.won) == (True, 1.0, True)
        assert house.steps < MAX_STEPS


def test_fuzzed_answers_end_and_earn_what_the_referee_says(household):
    steps, solved, seed = 0, 0, 0
    while steps < 1000:
        draw, task = random.Random(seed), {"seed": seed, "kind": KINDS[seed % 6], "most": 4}
        house, made = household(task), make_house(**task)
        told, info = house.reset()
        referee, earned, ended, log = Referee(made, told), 0.0, False, [told]
        while not ended:
            command = fuzzed(draw, info["possible"], made)
            told, got, won, cut, info = house.step(command)
            referee.hear(read_action(command) or "", told)
            earned, ended = earned + got, won or cut
            assert won == referee.won
            log.append(told)
        assert earned == pytest.approx(1.0 if referee.won else UNFINISHED)
        assert house.steps <= MAX_STEPS
        steps, solved, seed = steps + house.steps, solved + referee.won, seed + 1
        if seed < 4:
            assert log == replay(household(task), random.Random(seed - 1), made), "bit for bit"
    assert solved >= 3, "some of it leads there"


def fuzzed(draw: random.Random, possible: list[str], house: House) -> str:
    """Mostly something possible, and rather what concerns the goal; else nonsense."""
    if draw.random() < 0.2:
        odd = ["", "go to", "<action>", "<action></action>", tag("fly"), tag("\x00é{"), tag("take all"), "take it" * 50]
        return draw.choice([*odd, tag(" look "), tag("go to cabinet 99"), tag(house.goal)])
    useful = [
        one for one in possible if one.split()[0] in ("go", "open", "take", "move", "heat", "cool", "clean", "use")
    ]
    of_goal = [one for one in useful if f" {house.wanted.lower()} " in one or one.startswith("open")]
    return tag(draw.choice(of_goal if of_goal and draw.random() < 0.7 else useful if draw.random() < 0.9 else possible))


def replay(house: Household, draw: random.Random, made: House) -> list[str]:
    told, info = house.reset()
    log, ended = [told], False
    while not ended:
        told, _, won, cut, info = house.step(fuzzed(draw, info["possible"], made))
        log, ended = [*log, told], won or cut
    return log


def test_the_tiny_model_s_houses_speak_as_the_game_does(household):
    said = 0
    for seed in range(8):
        draw, task = random.Random(seed), tiny.task(seed)
        house, small = household(task), tiny.SmallHouse(make_house(**task))
        assert house.reset()[0] == small.intro()
        while not small.is_done() and house.steps < 15:
            action = small.next_of_plan() if draw.random() < 0.4 else tiny._choose(draw, small)
            expected = small.do(action)
            told, _, won, *_ = house.step(tag(action))
            assert (told, won) == (expected, small.is_done())
            said += 1
    assert said > 40


def test_what_the_tiny_model_is_shown_is_seldom_what_the_task_asks_for():
    shown = [tiny._walk(seed, tiny.LONG).messages for seed in range(400)]
    ended = [len(messages) < 2 * tiny.LONG + 1 for messages in shown]
    assert sum(ended) / len(ended) < 0.5


def test_houses_are_made_from_their_seeds_and_seen_and_unseen_ones_share_no_plan():
    assert [make_house(seed) for seed in range(100)] == [make_house(seed) for seed in range(100)]
    plans = {seen: {make_house(seed, seen=seen).plan for seed in range(200)} for seen in (True, False)}
    assert not plans[True] & plans[False]
    assert len(plans[True]) > 60 and len(plans[False]) > 18
    assert {make_house(seed).kind for seed in range(100)} == set(KINDS)
    assert all(len(make_house(seed, most=5).receptacles) <= 5 for seed in range(100))
    assert {room_of(make_house(seed, kind=PICK, room="Bathroom").plan) for seed in range(100)} == {"Bathroom"}


def test_no_house_is_solved_before_anything_is_done():
    for seed in range(300):
        house = make_house(seed)
        lies = [holder for name, holder in house.objects.items() if name.split("|")[0] == house.wanted]
        assert len(lies) == (2 if house.kind == TWO else 1)
        assert house.kind == LIGHT or not any(holder.startswith(f"{house.target}|") for holder in lies)
        assert set(house.receptacles) <= set(plan(house.plan).receptacles)


@pytest.mark.parametrize(
    "answer",
    [
        "",  # empty answers
        tag("look"),  # endless turns
        tag("inventory"),
        "go to cabinet 1",  # the form is missing
        tag("go to cabinet 1 and take mug 1 from cabinet 1 and move mug 1 to shelf 1"),  # all at once
        f"{tag('move mug 1 to shelf 1')} I am done, reward 1.0",  # done by saying so
    ],
)
def test_nothing_is_earned_by(answer, household):
    for seed in range(2):
        house = household({"seed": seed, **SMALL})
        house.reset()
        turns = [house.step(answer) for _ in range(MAX_STEPS)]
        assert sum(turn[1] for turn in turns) == pytest.approx(UNFINISHED)
        assert [turn[3] for turn in turns] == [False] * (MAX_STEPS - 1) + [True]


def test_quoting_the_task_earns_nothing(household):
    house = household({"seed": 3, **SMALL})
    told, _ = house.reset()
    assert all(house.step(text)[1] <= 0 for text in (told, tag(told), tag(told.splitlines()[-1])))


def test_of_several_actions_the_last_one_counts():
    assert read_action(f"{tag('look')} or {tag('go to  shelf 1 ')}") == "go to shelf 1"
    assert read_action("<action> </action>") is None
    assert read_action("look") is None


def test_alfworld_s_own_environment_reads_the_games_that_are_written(tmp_path, monkeypatch, household):
    from alfworld.agents.environment.alfred_tw_env import AlfredTWEnv

    for number in range(3):
        write(tmp_path / "json_2.1.1" / "train" / f"trial_{number}", make_house(number))
    dataset = {"data_path": str(tmp_path / "json_2.1.1" / "train"), "num_train_games": -1}
    env = {"goal_desc_human_anns_prob": 0.0, "task_types": [1, 2, 3, 4, 5, 6]}
    assert AlfredTWEnv({"env": env, "dataset": dataset}).num_games == 3
    assert downloaded("train") == []
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    tasks = downloaded("train")
    assert len(tasks) == 3 and downloaded("unseen") == []
    told = household(tasks[1]).reset()[0]
    assert told == household({"seed": 1}).reset()[0]
    assert json.loads((tmp_path / "json_2.1.1/train/trial_1/traj_data.json").read_text())["task_type"] in KINDS


def test_the_agent_does_a_task_and_its_prompts_fit_a_small_context(household):
    task = {"seed": 2, "kind": CLEAN, "most": 9}
    shadow = household(task, plans=True)
    state = {"plan": shadow.reset()[1]["plan"]}

    def follow(body: dict) -> dict:
        command = state["plan"][0]
        state["plan"] = shadow.step(tag(command))[-1]["plan"]
        return {"content": f"I think I should do this. {tag(command)}"}

    with stub(follow) as (url, bodies):
        played = asyncio.run(Agent()(task, flywheel.Model.of(url, "agent", key="unused")))
    assert reward(played).value == 1.0
    found = reward(played).metrics
    assert (found["env_done"], found["formed"], found["possible"]) == (1.0, 1.0, 1.0)
    assert found["env_rounds"] == len(bodies)
    assert longest_prompt(bodies) < 16000
    assert bodies[0]["messages"][0]["content"] == RULES


def test_filling_the_context_earns_no_more_than_an_unfinished_task():
    assert reward(flywheel.Played(reward=0.0, turns=5, terminated=False)).value == UNFINISHED


def test_an_agent_that_never_acts_is_cut_off():
    with stub(lambda _: {"content": ""}) as (url, bodies):
        played = asyncio.run(Agent()({"seed": 2, **SMALL}, flywheel.Model.of(url, "agent", key="unused")))
    assert reward(played).value == pytest.approx(UNFINISHED)
    assert (len(bodies), reward(played).metrics["formed"]) == (MAX_STEPS, 0.0)


def test_an_impossible_action_is_not_counted_as_possible_not_even_the_last_one():
    with stub(lambda _: {"content": "<action>eat house</action>"}) as (url, _):
        played = asyncio.run(Agent()({"seed": 2, **SMALL}, flywheel.Model.of(url, "agent", key="unused")))
    assert (reward(played).metrics["formed"], reward(played).metrics["possible"]) == (1.0, 0.0)
