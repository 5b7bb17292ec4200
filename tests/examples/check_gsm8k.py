"""Grade-school problems: the reward beside an oracle, files, and where a reward could be had for nothing."""

from __future__ import annotations

import asyncio
import json
import random

import flywheel
import pytest

from examples.gsm8k import tiny
from examples.gsm8k.__main__ import example
from examples.gsm8k.agent import PROMPT, agent
from examples.gsm8k.reward import reward
from examples.gsm8k.world import CannotRead, generated, load, split
from tests.examples.stub import longest_prompt, stub


def test_problems_are_generated_from_a_seed_within_their_bounds():
    first, again = (generated(300, seed=3, longest=250, largest=20) for _ in range(2))
    assert first == again
    for problem in first:
        assert 0 <= int(problem["answer"].rsplit("####")[-1]) <= 20
        assert len(problem["question"]) <= 250
        assert problem["answer"].count("####") == 1


def test_held_out_questions_are_not_learned_from():
    tasks, held_out = tiny.problems()
    assert not {one["question"] for one in tasks} & {one["question"] for one in held_out}
    assert len(held_out) >= 200


def test_a_thousand_fuzzed_answers_earn_what_an_oracle_says():
    draw = random.Random(5)
    for _ in range(1000):
        truth, said = draw.randint(0, 30), draw.randint(0, 30)
        form = draw.choice(("#### {}", "so \\boxed{{{}}}", "It is {}.", "{}", "#### {}\n"))
        found = reward({"question": "?", "answer": f"…\n#### {truth}"}, form.format(said))
        formed = "#" in form or "boxed" in form
        assert found.value == pytest.approx((1.0 * (said == truth) + 0.1) if formed else 0.0)


QUESTION = "How many are 2 and 3, 5?"
WITHOUT_FORM = ("", QUESTION, "5", "the number is 5", "#", "boxed{5}", PROMPT, f"{PROMPT}\n{QUESTION}", "#### five")


@pytest.mark.parametrize("reply", [*WITHOUT_FORM, r"\boxed{}"])
def test_nothing_is_earned_without_the_form(reply):
    assert reward({"question": QUESTION, "answer": "#### 5"}, reply).value == 0.0


def test_of_several_marked_numbers_one_counts():
    assert reward({"question": "", "answer": "#### 5"}, "#### 5 #### 6").metrics["correctness"] == 0.0
    assert reward({"question": "", "answer": "#### 5"}, "#### 1 2 3 4 5 6").metrics["correctness"] == 0.0


def test_a_file_of_the_real_problems_is_read(tmp_path):
    rows = [{"question": f"{n} + 1?", "answer": f"<<{n}+1={n + 1}>>\n#### {n + 1}"} for n in range(40)]
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    assert load(str(file)) == rows
    tasks, held_out = split(rows)
    assert (len(tasks), len(held_out)) == (36, 4)
    file.write_text('{"question": "x"}\n')
    with pytest.raises(CannotRead, match="row 1"):
        load(str(file))


def test_a_tiny_model_gets_the_problems_of_a_file_that_it_can_read_and_answer(tmp_path):
    small = [{"question": f"{n % 9} + {n % 7}, {n}?", "answer": f"#### {n % 9 + n % 7}"} for n in range(30)]
    other = [{"question": "long " * 80, "answer": "#### 1"}, {"question": "60 + 9?", "answer": "#### 69"}]
    other += [{"question": "a line\u2028here?", "answer": "#### 1,200"}, {"question": "less?", "answer": "#### -3"}]
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in (*other, *small)) + "\n")
    chosen, whole = (example(str(file), is_tiny=is_tiny) for is_tiny in (True, False))
    assert sorted(map(str, (*chosen.tasks, *chosen.held_out))) == sorted(map(str, small))
    assert len(whole.tasks) + len(whole.held_out) == 34
    file.write_text("\n".join(json.dumps(row) for row in (*small[:19], *other)) + "\n")
    with pytest.raises(CannotRead, match="19 of its 23 problems"):
        example(str(file), is_tiny=True)


def test_the_agent_answers_in_one_chat_and_its_prompt_fits_a_small_context():
    with stub(lambda body: {"content": "2 + 3 = 5\n#### 5"}) as (url, bodies):
        task = {"question": "2 + 3?", "answer": "#### 5"}
        reply = asyncio.run(agent(task, flywheel.Model.of(url, "agent", key="unused")))
    assert reward(task, reply).value == 1.1
    assert len(bodies) == 1
    assert longest_prompt(bodies) < 4096
