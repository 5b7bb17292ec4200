"""Runs: which chats are theirs, and which rows their rewards reach."""

from __future__ import annotations

import asyncio
import threading

import flywheel
import httpx
import openai
import pytest
from flywheel.transport import Chats

from tests.sdk.conftest import rows, said, say, say_async

HI = [{"role": "user", "content": "hi"}]


def test_a_run_s_chats_are_attributed_and_rewarded(client, explorer):
    with client.run(task_id="Aufgabe ü", run_id=0) as run:
        replies = [say(run.model), say(run.model)]
        run.reward(0.8, metrics={"correctness": 1})
        run.reward(-1, of=replies[0].id)
    assert run.msg_ids == [reply.id for reply in replies]
    assert [(row.task_id, row.run_id, row.msg_id) for row in rows(explorer)] == [
        ("Aufgabe ü", "0", msg_id) for msg_id in run.msg_ids
    ]
    assert [(s.kind, s.value) for s in said(explorer) if s.kind == "reward"][-1] == ("reward", -1.0)
    assert rows(explorer)[0].reward == -1.0


def test_each_attempt_at_a_named_task_is_a_run_of_its_own(client, explorer):
    for reward in (0.0, 1.0, 0.5):
        with client.run(task_id="t-17") as run:
            say(run.model)
            run.reward(reward)
    found = rows(explorer)
    assert [(row.task_id, row.reward) for row in found] == [("t-17", 0.0), ("t-17", 1.0), ("t-17", 0.5)]
    assert len({row.run_id for row in found}) == 3
    assert client.run().run_id == "0", "of a new task"


def test_streams_are_attributed_too(client, explorer):
    with client.run() as run:
        stream = run.model.openai().chat.completions.create(model="agent", messages=HI, stream=True)
        assert {event.id for event in stream} == {rows(explorer)[-1].msg_id}
    assert run.msg_ids == [rows(explorer)[-1].msg_id]


async def test_runs_at_once_do_not_mix_whichever_way_they_are_attributed(explorer):
    http = flywheel.async_http_client()
    for_ever = openai.AsyncOpenAI(base_url=f"{explorer.url}/v1", api_key="unused", http_client=http)

    async def one(client: flywheel.AsyncClient, number: int) -> flywheel.Run:
        async with client.run(f"t{number}") as run:
            await say_async(run.model)
            await for_ever.chat.completions.create(model="agent", messages=HI)
            await asyncio.to_thread(say, client.model())
            run.reward(number)
        return run

    async with flywheel.AsyncClient(explorer.url) as client:
        runs = await asyncio.gather(*(one(client, number) for number in range(32)))
    await http.aclose()
    by_task = {run.task_id: run for run in runs}
    assert len(rows(explorer)) == 96
    for row in rows(explorer):
        assert row.msg_id in by_task[row.task_id].msg_ids
        assert row.reward == int(row.task_id[1:])


def test_an_exception_leaves_the_run_unrewarded(client, explorer):
    with pytest.raises(ZeroDivisionError), client.run() as run:
        say(run.model)
        run.reward(1)
        1 / 0  # noqa: B018
    assert said(explorer) == []
    assert [row.reward for row in rows(explorer)] == [None]


def test_a_reward_for_a_run_without_chats_says_what_to_check(client):
    with pytest.raises(flywheel.NothingRecorded, match=r"task 't1'.*base URL.*store"), client.run("t1") as run:
        run.reward(1)


def test_a_run_without_a_reward_is_looked_for_too(client, explorer):
    with pytest.raises(flywheel.NothingRecorded), client.run("t2"):
        pass
    with client.run("t3") as run, openai.OpenAI(base_url=run.path_url, api_key="k") as openai_client:
        openai_client.chat.completions.create(model="agent", messages=HI)  # by the path: this process saw no reply
    assert (run.msg_ids, [row.task_id for row in rows(explorer)]) == ([], ["t3"])


def test_chats_of_an_untrained_model_are_not_recorded(client, explorer, scripted_engine):
    with client.run() as run:
        say(run.untrained())
        say(run.model.with_params(temperature=0.25))
        run.reward(1)
    assert len(rows(explorer)) == 1
    assert (len(run.msg_ids), run.unrecorded) == (1, 1)
    assert [body.get("temperature") for body in scripted_engine.script.bodies] == [None, 0.25]


def test_a_child_has_rewards_of_its_own(client, explorer):
    with client.run("game", 0) as game:
        for name, reward in (("wolf-1", 1.0), ("wolf-2", -1.0)):
            wolf = game.child(name)
            say(wolf.model)
            wolf.reward(reward)
    assert [(row.run_id, row.reward) for row in rows(explorer)] == [("0/wolf-1", 1.0), ("0/wolf-2", -1.0)]


def test_a_parent_whose_program_chatted_is_rewarded_beside_its_children(client, explorer):
    with client.run("game", 0) as game:
        with openai.OpenAI(base_url=game.path_url, api_key="k") as program:
            program.chat.completions.create(model="agent", messages=HI)
        say(game.child("wolf-1").model)
        game.reward(0.5)
    assert [(row.run_id, row.reward) for row in rows(explorer)] == [("0", 0.5), ("0/wolf-1", None)]


def test_a_reward_after_the_block_is_refused_because_nothing_would_send_it(client):
    with client.run("game") as game:
        say(game.model)
        wolf = game.child("wolf-1")
        with wolf:
            say(client.model())
        wolf.reward(1.0)
    for run in (game, wolf):
        with pytest.raises(flywheel.ConfigError, match=rf"client.feedback\(task_id='game', run_id='{run.run_id}'"):
            run.reward(0.5)


def test_a_run_that_is_entered_again_is_rewarded_at_its_last_end(client, explorer):
    run = client.run("game")
    with run:
        say(run.model)
    with run:
        say(run.model)
        run.reward(0.5)
    assert [row.reward for row in rows(explorer)] == [0.5, 0.5]


def test_credit_may_be_a_function_of_the_messages(client, explorer):
    with client.run(credit=lambda reward, ids: [reward * (n + 1) for n in range(len(ids))]) as run:
        for _ in range(3):
            say(run.model)
        run.reward(2, comment="well done")
    assert [row.reward for row in rows(explorer)] == [2.0, 4.0, 6.0]
    with pytest.raises(flywheel.ConfigError, match="credit gave 1"), client.run(credit=lambda *_: [1.0]) as run:
        say(run.model), say(run.model)
        run.reward(2)
    with pytest.raises(flywheel.ConfigError, match="credit="):
        client.run(credit="last")


def test_a_wrong_reward_is_refused_where_it_is_said(client):
    run = client.run()
    with pytest.raises(flywheel.ConfigError, match="reward=nan"):
        run.reward(float("nan"))
    assert run.feedback() == []


def test_no_other_host_learns_of_a_run(client, scripted_engine):
    other = openai.OpenAI(base_url=f"{scripted_engine.url}/v1", api_key="k", http_client=flywheel.http_client())
    seen = []
    engine_chat = scripted_engine.script
    with client.run("secret task") as run:
        other.chat.completions.create(model="agent", messages=HI, extra_headers={"X-Request-Id": "r"})
        seen.append(engine_chat.bodies[-1])
        say(run.model)
    assert run.msg_ids
    assert len(run.msg_ids) == 1
    other.close()


def test_a_thread_that_has_no_context_uses_the_run_s_own_model(client, explorer):
    with client.run("threads") as run:
        thread = threading.Thread(target=say, args=(run.model,))
        thread.start()
        thread.join()
        run.reward(1)
    assert [row.task_id for row in rows(explorer)] == ["threads"]


def test_the_environment_of_a_program_names_the_run_in_its_url(client):
    run = client.run("a/b", "0")
    assert run.env()["OPENAI_BASE_URL"] == f"{client.url}/run/a%2Fb/0/v1"
    with pytest.raises(flywheel.ConfigError, match="store"):
        run.untrained().env()


def test_version_and_parameters_belong_to_the_model(client, explorer):
    model = client.model(0, temperature=0)
    assert say(model).id
    assert (model.name, model.is_trainee, client.model().is_trainee) == ("agent@0", False, True)
    assert not flywheel.Model.of(f"{client.url}/v1", "agent").is_trainee
    assert [row.temperature for row in rows(explorer)] == [0.0]


@pytest.mark.parametrize("name", ["two\nlines", " spaces ", "a\x01b"])
def test_a_run_may_have_a_name_that_no_header_can_carry(client, explorer, name):
    with client.run(name, f"{name}/0") as run:
        say(run.model)
        run.reward(0.5)
    assert [(row.task_id, row.run_id, row.reward) for row in rows(explorer)] == [(name, f"{name}/0", 0.5)]


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("/v1/gateway/v1/chat/completions", "/v1/gateway/run/a%0Ab/0/v1/chat/completions"),
        ("/chat", "/run/a%0Ab/0/chat"),
        ("/run/a%0Ab/0/v1/completions", "/run/a%0Ab/0/v1/completions"),
        ("/health", "/health"),
    ],
)
def test_an_address_names_a_run_once_before_the_explorer_s_route(client, path, sent):
    request = httpx.Request("POST", client.url + path)
    assert Chats(client.run("a\nb", 0), {}, {}).prepare(request)[0].url.raw_path == sent.encode()
