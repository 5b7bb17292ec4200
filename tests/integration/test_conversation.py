"""Agents that name no run: their turns are linked by what they say, and trained as one trajectory."""

from __future__ import annotations

from sqlalchemy import select

from shared.ledger import transitions
from shared.ledger.tables import experiences

FIRST = [{"role": "user", "content": "what is the weather?"}]


def turn(explorer, messages, **body):
    reply = explorer.http.post("/v1/chat/completions", json={"messages": messages, **body}).raise_for_status().json()
    return reply["id"], [*messages, reply["choices"][0]["message"]]


def go_on(messages, text):
    return [*messages, {"role": "user", "content": text}]


def rows(explorer):
    columns = (experiences.c.msg_id, experiences.c.choice, experiences.c.parent_id, experiences.c.conversation_id)
    with explorer.ledger.read() as connection:
        return {row.msg_id: row for row in connection.execute(select(*columns))}


def test_turns_that_extend_each_other_are_one_conversation(explorer):
    first, messages = turn(explorer, FIRST)
    second, messages = turn(explorer, go_on(messages, "and tomorrow?"))
    third, _ = turn(explorer, go_on(messages, "thanks"))
    found = rows(explorer)
    assert [found[name].parent_id for name in (first, second, third)] == [None, first, second]
    assert {row.conversation_id for row in found.values()} == {first}


def test_interleaved_runs_that_begin_alike_do_not_mix(explorer, scripted_engine):
    """Both runs say the same and are told the same, token for token: each must still continue itself, once."""
    first_a, a = turn(explorer, FIRST)
    first_b, b = turn(explorer, FIRST)
    second_a, a = turn(explorer, go_on(a, "in Rome"))
    second_b, b = turn(explorer, go_on(b, "in Oslo"))
    third_b, _ = turn(explorer, go_on(b, "thanks"))
    third_a, _ = turn(explorer, go_on(a, "thanks"))
    found = rows(explorer)
    assert {found[second_a].parent_id, found[second_b].parent_id} == {first_a, first_b}
    assert found[third_a].parent_id == second_a
    assert found[third_b].parent_id == second_b
    assert len({row.conversation_id for row in found.values()}) == 2


def test_runs_with_names_link_only_inside_themselves(explorer):
    _, messages = turn(explorer, FIRST, metadata={"task_id": "t", "run_id": "1"})
    other, _ = turn(explorer, go_on(messages, "more"), metadata={"task_id": "t", "run_id": "2"})
    assert rows(explorer)[other].parent_id is None


def test_each_of_n_choices_can_be_continued(explorer):
    reply = explorer.http.post("/v1/chat/completions", json={"messages": FIRST, "n": 2}).json()
    messages = [*FIRST, {"role": "assistant", "content": reply["choices"][1]["message"]["content"]}]
    second, _ = turn(explorer, go_on(messages, "more"))
    assert rows(explorer)[second].parent_id in (reply["id"], reply["id"] + "#1")


def test_streamed_turns_are_linked_too(explorer):
    body = {"messages": FIRST, "stream": True}
    with explorer.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        lines = [line for line in reply.iter_lines() if line.startswith("data: {")]
    import json

    events = [json.loads(line[6:]) for line in lines]
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
    second, _ = turn(explorer, go_on([*FIRST, {"role": "assistant", "content": text}], "more"))
    assert rows(explorer)[second].parent_id == events[0]["id"]


def test_feedback_of_scope_conversation_reaches_all_turns(explorer):
    first, messages = turn(explorer, FIRST)
    second, _ = turn(explorer, go_on(messages, "and tomorrow?"))
    other, _ = turn(explorer, [{"role": "user", "content": "something else"}])
    said = {"msg_ids": [second], "reward": 1.0, "scope": "conversation"}
    answer = explorer.http.post("/feedback", json=said).json()
    assert answer["applied"] == 2
    assert {receipt["msg_id"] for receipt in answer["receipts"]} == {first, second}
    with explorer.ledger.read() as connection:
        rewards = dict(connection.execute(select(experiences.c.msg_id, experiences.c.reward)).all())
    assert rewards == {first: 1.0, second: 1.0, other: None}


def test_a_linked_conversation_whose_tokens_extend_each_other_is_trained_as_one_trajectory(explorer, scripted_engine):
    from trainer_service.batch import assemble

    script = scripted_engine.script
    _, messages = turn(explorer, FIRST)
    script.prompt_ids = [*script.prompt_ids, *script.reply_ids, 20, 21]
    second, _ = turn(explorer, go_on(messages, "and tomorrow?"))
    explorer.http.post("/feedback", json={"msg_ids": [second], "reward": 1, "scope": "conversation"})
    explorer.http.post("/commit")
    with explorer.ledger.write() as connection:
        batch = transitions.claim(connection, owner="t", at_least=1, at_most=8, lease_s=60)
        lease = transitions.load_lease(connection, batch)
    (trajectory,) = assemble(lease.rows)
    assert trajectory.actions.tolist() == [4, 5, 6, 9, 10, 11]
    assert trajectory.rewards.tolist() == [0, 0, 1, 0, 0, 1]
