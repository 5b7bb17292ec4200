"""The support agent on the OpenAI Agents SDK, by the strong model, and by a trainee that refunds everybody."""

from __future__ import annotations

import json
import random
from collections import deque

import flywheel
import pytest

from examples.shadow import play
from examples.shadow.agent import support
from examples.shadow.services import TrialOffices, office, serve, strong_model
from examples.shadow.world import DUE, Office, complaint_of, state_of, write_ticket
from tests.examples.loop import in_a_loop
from tests.examples.stub import call, stub


def test_the_strong_model_answers_every_ticket_right():
    with serve(strong_model) as url:
        found = play.evaluate("http://127.0.0.1:9", flywheel.Model.of(f"{url}/v1", "strong"), {}, tickets=30)
    assert (found.mean, found.failed, found.n) == (1.0, 0, 30)


def test_a_shuffled_run_gets_no_rating_of_its_own_ticket():
    earlier, draw = deque(), random.Random(0)
    assert [play.exchange(1.0, "a", earlier, draw) for _ in range(3)] == [None] * 3
    assert [play.exchange(0.0, "b", earlier, draw) for _ in range(3)] == [1.0] * 3


def test_an_evaluation_counts_a_refund_of_an_order_that_does_not_exist():
    def careless(body):
        if body["messages"][-1]["role"] != "tool":
            return call("refund", 1, order="7")
        said = body["messages"][1]["content"]
        return {"content": DUE[state_of(said.split()[1]), complaint_of(said)]}

    with stub(careless) as (model, _):
        found = play.evaluate("http://127.0.0.1:9", flywheel.Model.of(model, "careless"), {}, tickets=20)
    assert (found.mean, found.failed, found.n) == (0.0, 0, 20)


@in_a_loop
async def test_a_chat_fits_and_offers_both_tools():
    offices = TrialOffices()
    with serve(offices.answer) as desk, stub(lambda _: {"content": "wait"}) as (model, bodies):
        request = {"message": write_ticket("1").message, "office": f"{desk}/a"}
        assert await support(request, flywheel.Model.of(model, "m")) == "wait"
    assert {tool["function"]["name"] for tool in bodies[0]["tools"]} == {"lookup", "refund"}
    assert len(json.dumps(bodies[0])) < 4000
    assert all(body["max_tokens"] >= 256 for body in bodies), "room for what Qwen says before it acts"


@pytest.mark.parametrize("tools", [flywheel.RecordedTools(), flywheel.ReadOnlyTools()])
@in_a_loop
async def test_a_trainee_that_refunds_everybody_writes_nothing(tools):
    desk, paid = Office(), []

    def greedy(body):
        if "messages" not in body:  # a commit, or feedback, which nobody takes here
            return {}
        return call("refund", 1, order=body["messages"][1]["content"].split()[1])

    def rated(run, _reply):
        paid.extend(run.attempts)

    with serve(office(desk)) as url, serve(strong_model) as strong, stub(greedy) as (trainee, bodies):
        runner = flywheel.TrainingRunner(
            trainee.removesuffix("/v1"), reward=rated, select=flywheel.SamplingRate(1.0), tools=tools
        )
        answered = runner.watch(support, production=flywheel.Model.of(f"{strong}/v1", "strong"))
        replies = []
        with runner:
            for number in range(12):
                replies.append(await answered({"message": write_ticket(f"{number}").message, "office": url}))
    assert len(desk.refunds) == replies.count("refunded") > 0, "production's refunds, and no other"
    assert runner.stats.runs == 12 <= len(bodies)
    unsafe = runner.stats.unsafe
    assert unsafe == 12 if type(tools) is flywheel.ReadOnlyTools else len(paid) > 0
