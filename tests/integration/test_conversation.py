"""Agents that name no run: their turns are linked by what they say, and trained as one trajectory."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from shared.ledger import queries, transitions
from shared.ledger.tables import experiences
from tests.support.forms import one_database
from tests.support.smolagents_history import code_step, tool_step

pytestmark = one_database

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


def call(name):
    return {"id": name, "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}


class Run:
    """An agent on smolagents: its history holds text alone. All runs ask the same and see the same."""

    def __init__(self, explorer, script):
        self.explorer, self.script = explorer, script
        self.history, self.turns = list(FIRST), []

    def use_tools(self, *names):
        self._ask({"content": None, "tool_calls": [call(name) for name in names]})
        self.history += tool_step(self.reply, ["Paris: sunny"] * len(names))

    def run_code(self):
        self._ask({"content": "Thought: look.\n<code>\nprint(weather('Paris'))\n"})
        self.history += code_step(self.reply["content"], len(self.turns), "Paris: sunny")

    def answer(self):
        self._ask({"content": "It is sunny."})
        self.history += [self.reply, {"role": "user", "content": "thanks"}]

    def _ask(self, message):
        self.script.message = message
        name, (*_, self.reply) = turn(self.explorer, self.history)
        self.turns.append(name)


def in_line(found, run):
    """Whether each turn continues the one before, in a conversation that no other run has."""
    names = {found[name].conversation_id for name in run.turns}
    return [found[name].parent_id for name in run.turns] == [None, *run.turns[:-1]] and names == {run.turns[0]}


def test_interleaved_runs_whose_tool_calls_come_back_as_text_do_not_mix(explorer, scripted_engine):
    a, b = (Run(explorer, scripted_engine.script) for _ in range(2))
    a.use_tools("chatcmpl-tool-aaaaaaaaaaaaaaaa")
    b.use_tools("chatcmpl-tool-bbbbbbbbbbbbbbbb")
    b.use_tools("chatcmpl-tool-b2b2b2b2b2b2b2b2", "chatcmpl-tool-0000000000000000")
    a.use_tools("chatcmpl-tool-a2a2a2a2a2a2a2a2", "chatcmpl-tool-1111111111111111")
    for run in (a, b, b, a):
        run.answer()
    found = rows(explorer)
    assert in_line(found, a)
    assert in_line(found, b)


def test_interleaved_runs_of_code_that_begin_alike_do_not_mix(explorer, scripted_engine):
    """Both say the same and are told the same, and no id of the engine comes back: each exchange is continued once."""
    a, b = (Run(explorer, scripted_engine.script) for _ in range(2))
    for run in (a, b, a, b):
        run.run_code()
    for run in (a, b):
        run.answer()
    found = rows(explorer)
    heads = {row.conversation_id for row in found.values()}
    assert len(heads) == 2
    assert sorted(row.parent_id for row in found.values() if row.parent_id) == sorted([*a.turns[:2], *b.turns[:2]])


def test_a_result_that_quotes_another_runs_call_does_not_lead_to_it(explorer, scripted_engine):
    a, b = (Run(explorer, scripted_engine.script) for _ in range(2))
    a.use_tools("chatcmpl-tool-aaaaaaaaaaaaaaaa")
    b.use_tools("chatcmpl-tool-bbbbbbbbbbbbbbbb")
    quoted = a.history[-2]["content"][0]["text"]
    b.history += [{"role": "user", "content": quoted}]
    b.answer()
    scripted_engine.script.message = {"content": quoted}
    name, messages = turn(explorer, b.history)
    last, _ = turn(explorer, go_on(messages, "and now?"))
    found = rows(explorer)
    assert [found[name].parent_id, found[last].parent_id] == [b.turns[-1], name]
    assert {row.conversation_id for row in found.values() if row.conversation_id} == {b.turns[0]}


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


@pytest.mark.parametrize("each", [False, True])
def test_a_run_that_is_named_with_a_conversation_has_all_of_its_turns(explorer, each):
    _, messages = turn(explorer, FIRST)
    second, _ = turn(explorer, go_on(messages, "and tomorrow?"))
    about = {"msg_ids": [second], "scope": "conversation", "each": each, "task_id": "t", "run_id": "0"}
    explorer.http.post("/feedback", json={**about, "reward": 1})
    with explorer.ledger.read() as connection:
        found = connection.execute(select(experiences.c.task_id, experiences.c.run_id)).all()
    assert [tuple(row) for row in found] == [("t", "0")] * 2, "or its reward would count once more outside of the run"


def test_a_linked_conversation_whose_tokens_extend_each_other_is_trained_as_one_trajectory(explorer, scripted_engine):
    from tests.support.batches import assemble

    script = scripted_engine.script
    _, messages = turn(explorer, FIRST)
    script.prompt_ids = [*script.prompt_ids, *script.reply_ids, 20, 21]
    second, _ = turn(explorer, go_on(messages, "and tomorrow?"))
    explorer.http.post("/feedback", json={"msg_ids": [second], "reward": 1, "scope": "conversation"})
    explorer.http.post("/commit")
    with explorer.ledger.write() as connection:
        batch = transitions.claim(connection, owner="t", at_least=1, at_most=8, lease_s=60)
        lease = queries.load_lease(connection, batch)
    (trajectory,) = assemble(lease.rows)
    assert trajectory.actions.tolist() == [4, 5, 6, 9, 10, 11]
    assert trajectory.rewards.tolist() == [0, 0, 0, 0, 0, 1]
