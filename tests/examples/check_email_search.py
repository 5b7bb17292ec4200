"""The email agent on LangGraph, with a model that does what is asked, and with models that do not."""

from __future__ import annotations

import json

import flywheel
import openai
import pytest

from examples.email_search.agent import MAX_TURNS, answer_by_mail
from examples.email_search.reward import judged, reward
from examples.email_search.world import UNKNOWN, Mailbox, Visit, make_questions, task_of
from tests.examples.loop import in_a_loop
from tests.examples.stub import call, stub

MAILBOX, QUESTIONS = Mailbox.generated(), make_questions()
ANSWERED = next(one for one in QUESTIONS if one.message_ids)
OPEN = next(one for one in QUESTIONS if not one.message_ids)


async def work(question, answers) -> tuple[Visit, list]:
    """A visit with a model that gives these messages, the last of them for ever."""
    visit = Visit(MAILBOX, question)
    with stub(lambda body: answers[min(len(answers), len(chats(body))) - 1]) as (model, bodies):
        request = {**task_of(question), "mail": visit}
        visit.last_text = await answer_by_mail(request, flywheel.Model.of(model, "m"))
    return visit, bodies


def chats(body) -> list:
    """One for each chat so far, this one included."""
    return [None, *(message for message in body["messages"] if message["role"] == "assistant")]


@in_a_loop
async def test_it_searches_reads_and_answers():
    source = ANSWERED.message_ids[0]
    steps = [
        call("search_emails", 1, keywords=ANSWERED.question.split()[-3:-1]),
        call("read_email", 2, message_id=source),
        call("answer", 3, answer=ANSWERED.answer, sources=[source]),
    ]
    visit, bodies = await work(ANSWERED, steps)
    assert reward(visit).value == pytest.approx(1.47)
    assert len(bodies) == 3, "it ends with the answer"
    assert ANSWERED.inbox_address in bodies[0]["messages"][0]["content"]
    assert {tool["function"]["name"] for tool in bodies[0]["tools"]} == {"search_emails", "read_email", "answer"}
    assert all(len(json.dumps(body)) < 8000 for body in bodies)
    assert all(body["max_completion_tokens"] >= 256 for body in bodies), "room for what Qwen says before it acts"


@in_a_loop
async def test_it_may_say_that_it_does_not_know():
    steps = [
        call("search_emails", 1, keywords=OPEN.question.split()[-3:-1]),
        call("answer", 2, answer=UNKNOWN, sources=[]),
    ]
    visit, _ = await work(OPEN, steps)
    assert reward(visit).value == pytest.approx(1.08)


@in_a_loop
async def test_text_instead_of_a_call_wrong_arguments_and_endless_searches_end_with_little():
    said, _ = await work(ANSWERED, [{"content": ANSWERED.answer}])
    assert reward(said).metrics["malformed"] == 1.0 and reward(said).value < -1
    silent, bodies = await work(ANSWERED, [{"content": ""}])
    assert reward(silent).metrics["malformed"] == 1.0 and reward(silent).value < -1 and len(bodies) == 1
    wrong, _ = await work(ANSWERED, [call("search_emails", 1, word="x"), call("fly", 2), {"content": "x"}])
    assert reward(wrong).value < -1
    endless, bodies = await work(ANSWERED, [call("search_emails", 1, keywords=["the"])])
    assert len(bodies) <= MAX_TURNS + 1 and reward(endless).value <= 0.2


@in_a_loop
async def test_a_call_of_an_unknown_tool_is_answered_and_costs_two_by_the_articles_weights():
    source = ANSWERED.message_ids[0]
    steps = [
        call("fly", 1, to="the mail"),
        call("search_emails", 2, keywords=ANSWERED.question.split()[-3:-1]),
        call("read_email", 3, message_id=source),
        call("answer", 4, answer=ANSWERED.answer, sources=[source]),
    ]
    visit, _ = await work(ANSWERED, steps)
    assert [one.name for one in visit.calls] == ["fly", "search_emails", "read_email", "answer"]
    assert reward(visit, by_tools=True).value == pytest.approx(2.5 - 2)


@in_a_loop
async def test_a_history_that_fills_the_context_ends_the_visit_and_another_error_the_run():
    begun = call("search_emails", 1, keywords=["nothing", "of", "this"])
    visit, bodies = await work(OPEN, [begun, {"error": "The maximum context length is 9."}])
    assert (visit.answered, len(visit.calls), len(bodies)) == (None, 1, 2)
    for messages in ([{"error": "The maximum context length is 9."}], [begun, {"error": "no such model"}]):
        with pytest.raises(openai.BadRequestError):
            await work(OPEN, messages)


@in_a_loop
async def test_a_half_of_a_surrogate_pair_in_a_call_is_answered_and_the_run_goes_on():
    steps = [
        call("read_email", 1, message_id="\ud83d"),
        call("search_emails", 2, keywords=["\ud83d"]),
        call("answer", 3, answer="\ud83d", sources=["\ud83d"]),
    ]
    visit, bodies = await work(ANSWERED, steps)
    assert len(bodies) == len(visit.calls) == 3 and reward(visit).value < 0


@in_a_loop
async def test_a_judge_reads_what_is_not_the_true_answer_word_for_word():
    visit = Visit(MAILBOX, ANSWERED)
    visit.answer(f"I think {ANSWERED.answer}", [])
    with stub(lambda _: {"content": '{"quality": {"reason": "right", "score": 5}}'}) as (url, bodies):
        judge = flywheel.LLMJudge(flywheel.Model.of(url, "judge"), "Is the answer right?")
        assert (await judged(visit, judge, by_tools=False)).metrics["right"] == 1.0
        assert ANSWERED.answer in json.dumps(bodies[0]) and len(bodies) == 1
    assert (await judged(visit, None, by_tools=False)).metrics["right"] == 0.0
