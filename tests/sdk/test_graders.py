"""OpenAI's graders as reward functions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import flywheel
import pytest
from flywheel.rewards import from_openai_grader

from tests.sdk.conftest import learn, rows

TASK = {"answer": "the cat sat", "tags": ["a", "b"]}
REPLY = "{{ sample.output_text }}"
TRUTH = "{{ item.answer }}"


def score(grader: dict[str, Any], reply: str, **options: Any) -> flywheel.Reward:
    return asyncio.run(from_openai_grader(json.dumps(grader), **options)(TASK, reply))


@pytest.mark.parametrize(
    ("operation", "reply", "value"),
    [
        ("eq", "the cat sat", 1.0),
        ("eq", "The cat sat", 0.0),
        ("ne", "no", 1.0),
        ("like", "so the cat sat down", 1.0),
        ("ilike", "So The Cat Sat", 1.0),
        ("like", "So The Cat Sat", 0.0),
    ],
)
def test_strings_are_checked(operation, reply, value):
    grader = {"type": "string_check", "operation": operation, "input": REPLY, "reference": TRUTH}
    assert score(grader, reply).value == value


@pytest.mark.parametrize(
    ("metric", "reply", "value"),
    [
        ("rouge_1", "the cat sat", 1.0),
        ("rouge_1", "the dog sat", 2 / 3),
        ("rouge_2", "the cat ran", 0.5),
        ("rouge_l", "cat the sat", 2 / 3),
        ("bleu", "the cat sat", 1.0),
        ("bleu", "a dog", 0.0),
        ("gleu", "the cat", 0.5),
        ("fuzzy_match", "the cat sat", 1.0),
    ],
)
def test_texts_are_compared(metric, reply, value):
    grader = {"type": "text_similarity", "evaluation_metric": metric, "input": REPLY, "reference": TRUTH}
    assert score(grader, reply).value == pytest.approx(value)


def test_places_reach_into_lists_and_the_reply_s_json():
    place = "{{ sample.output_json.tags[1] }}"
    grader = {"type": "string_check", "operation": "eq", "input": place, "reference": "{{ item.tags[1] }}"}
    assert score(grader, '{"tags": [1, "b"]}').value == 1.0


def test_several_are_one_formula_and_their_scores_are_metrics():
    check = {"type": "string_check", "operation": "ilike", "input": REPLY, "reference": TRUTH}
    similar = {"type": "text_similarity", "evaluation_metric": "rouge_1", "input": REPLY, "reference": TRUTH}
    parts = {"right": check, "near": similar}
    multi = {"type": "multi", "graders": parts, "calculate_output": "max(right, near) ^ 2 - 1"}
    assert score(multi, "the dog sat") == flywheel.Reward(pytest.approx(4 / 9 - 1), {"right": 0.0, "near": 2 / 3})
    with pytest.raises(flywheel.ConfigError, match="calculate_output"):
        score({**multi, "calculate_output": "right.__class__"}, "x")


def test_python_runs_only_where_it_is_allowed():
    source = "def grade(sample, item):\n    return len(sample['output_text']) / len(item['answer'])"
    grader = {"type": "python", "source": source}
    assert score(grader, "the cat sat", run_python=True).value == 1.0
    with pytest.raises(flywheel.ConfigError, match="run_python"):
        score(grader, "x")


@pytest.mark.parametrize(("said", "value"), [('{"result": 0.5}', 0.5), ('{"result": 7}', None), ("good", None)])
def test_a_model_scores_within_its_range_or_there_is_no_reward(explorer, scripted_engine, said, value):
    scripted_engine.script.message, scripted_engine.script.reply_id = {"content": said}, "chatcmpl-1"
    grader = {"type": "score_model", "input": [{"role": "user", "content": f"Score {REPLY}"}], "range": [0, 1]}
    model = flywheel.Model.of(f"{scripted_engine.url}/v1", "agent", key="k")
    if value is None:
        with pytest.raises(flywheel.JudgeFailed):
            score(grader, "x", model=model)
    else:
        assert score(grader, "x", model=model).value == value
    assert scripted_engine.script.bodies[-1]["messages"][0]["content"] == "Score x"


def test_a_model_is_asked_with_the_messages_and_sampling_parameters_of_openai_s_form(scripted_engine):
    scripted_engine.script.message = {"content": '{"result": 0.5}'}
    parts = [{"type": "input_text", "text": f"Score {REPLY}"}, "briefly"]
    turns = [{"type": "message", "role": "developer", "content": parts[0]}, {"role": "user", "content": parts}]
    grader = {"type": "score_model", "input": turns, "sampling_params": {"max_completions_tokens": 9, "seed": None}}
    model = flywheel.Model.of(f"{scripted_engine.url}/v1", "agent", key="k")
    assert score(grader, "x", model=model).value == 0.5
    (body,) = scripted_engine.script.bodies
    wanted = [{"role": "developer", "content": "Score x"}, {"role": "user", "content": "Score x\nbriefly"}]
    assert (body["messages"][:2], body["max_completion_tokens"], "seed" in body) == (wanted, 9, False)
    with pytest.raises(flywheel.ConfigError, match="input_image"):
        score({**grader, "input": [{"role": "user", "content": {"type": "input_image"}}]}, "x", model=model)


@pytest.mark.parametrize(
    ("grader", "named"),
    [
        ({"type": "endpoint"}, "type='endpoint'"),
        ({"type": "text_similarity", "evaluation_metric": "cosine"}, "cosine"),
        ({"type": "string_check", "operation": "is"}, "operation='is'"),
        ({"type": "score_model"}, "model="),
    ],
)
def test_what_is_unknown_is_named(grader, named):
    with pytest.raises(flywheel.ConfigError, match=named):
        from_openai_grader(grader)


def test_a_grader_judges_in_learn(explorer, tmp_path):
    async def answer(task: Any, model: flywheel.Model) -> str:
        async with model.async_openai() as openai:
            said = [{"role": "user", "content": "hi"}]
            reply = await openai.chat.completions.create(model=model.name, messages=said)
        return reply.choices[0].message.content or ""

    grade = from_openai_grader({"type": "string_check", "operation": "like", "input": REPLY, "reference": "answer"})
    assert learn(explorer, tmp_path, answer, [{"n": 1}], judge=grade).reward_last == 1.0
    assert [row.reward for row in rows(explorer)] == [1.0]


def test_a_reply_without_the_field_that_is_asked_for_scores_0():
    place = "{{ sample.output_json.answer }}"
    grader = {"type": "string_check", "operation": "eq", "input": place, "reference": TRUTH}
    replies = ("no json", "[]", '{"other": 1}', '{"answer": "the cat sat"}')
    assert [score(grader, reply).value for reply in replies] == [0.0, 0.0, 0.0, 1.0]
    with pytest.raises(flywheel.ConfigError, match=r"item\.wrong"):
        score({**grader, "reference": "{{ item.wrong }}"}, replies[-1])


HANGS = "import time\ndef grade(sample, item):\n    time.sleep(10)\n"
SLOW = {"type": "text_similarity", "evaluation_metric": "fuzzy_match", "input": REPLY, "reference": TRUTH}


@pytest.mark.parametrize(
    ("grader", "options"), [({"type": "python", "source": HANGS}, {"run_python": True}), (SLOW, {})]
)
async def test_the_time_limit_of_a_judge_ends_a_grader_that_takes_long(grader, options):
    grade = from_openai_grader(json.dumps(grader), **options)
    texts = {"answer": "ab" * 2500}, "ba" * 2500
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(grade(*texts), 0.2)
