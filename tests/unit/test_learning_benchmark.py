"""The learning benchmark's cases are configurations that the trainer takes, and its figures are what they say."""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.learning.__main__ import is_reversed, summary
from benchmarks.learning.cases import CASES, GRUMP, comment, each, of_others, one_hates, reward
from benchmarks.learning.peers import PEERS
from benchmarks.learning.run import Plan
from benchmarks.learning.world import Reply, in_tasks, worth
from examples.support_desk.desk import Ticket, format_answer
from shared.config import TrainerConfig
from shared.experience import Tokens


def reply(text: str, desk: str = "refunds", priority: str = "low") -> Reply:
    nothing = np.zeros(1, np.int32)
    return Reply(Ticket("hello", desk, priority), text, Tokens(nothing, nothing, np.zeros(1, np.float32)))


@pytest.mark.parametrize("name", CASES)
def test_an_algorithm_learns_from_all_signals_of_a_case(name):
    plan, replies = CASES[name], [reply("refunds , low"), reply("refunds , urgent")]
    learned = TrainerConfig.model_validate(plan.trainer).learns_from
    said = plan.say(replies, random.Random(0))
    assert len(said) == 2 and all({signal.kind for signal in signals} <= learned for signals, _ in said)


def test_rewards_of_replies_and_signals_of_customers():
    good, half = reply("refunds , low"), reply("refunds , urgent")
    assert (worth(good), worth(half), worth(reply("nonsense"))) == (1.0, 0.7, 0.0)
    draw = random.Random(1)
    assert [signals[0].value for signals, _ in each(reward)([good, half], draw)] == [1.0, 0.7]
    others = [reply("", desk, "low") for desk in ("refunds", "invoices", "pricing")]
    said = [signals[0].text for signals, _ in of_others(comment)(others, draw)]
    assert sorted(said) == sorted(format_answer(one.ticket.desk, "low") for one in others)
    judged = one_hates(1.0)([good], draw)
    assert judged[0][1] == GRUMP and judged[0][0][0].value == 0.0


def test_each_run_of_a_task_has_the_tickets_of_its_turns_and_single_samples_name_no_task():
    drawn = iter(range(9))
    tickets = in_tasks(lambda: Ticket(str(next(drawn)), "refunds", "low"), 10, 3, 2)
    assert "".join(one.text for one in tickets) == "0101012323"
    plan = Plan({}, each(reward), runs=3, turns=2)
    names = [tuple(plan.names(5, place).values()) for place in range(7)]
    assert names == [*(("t5-0", f"r{run}") for run in (0, 0, 1, 1, 2, 2)), ("t5-1", "r3")]
    assert Plan({}, each(reward)).names(5, 0) == {}


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].attempts > 1])
def test_an_update_contains_whole_tasks(name):
    assert CASES[name].rows % CASES[name].attempts == 0


def test_the_second_style_names_the_priority_first():
    assert is_reversed(reply("low , refunds"))
    assert not is_reversed(reply("refunds , low")) and not is_reversed(reply("urgent , refunds"))


def test_figures_have_medians_ranges_and_the_number_of_runs_that_reached_the_goal():
    runs = [{"last": one, "episodes": many, "rewards": []} for one, many in ((0.5, None), (0.9, 100), (0.7, 300))]
    shown = summary(runs)
    assert shown["last"] == {"median": 0.7, "range": [0.5, 0.9]}
    assert (shown["runs"], shown["reached"]) == (3, 2)


def test_names_of_cases_can_be_listed_with_commas():
    assert not [name for name in [*CASES, *PEERS] if "," in name]
