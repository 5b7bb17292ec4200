"""Which rows feedback names: choices, tasks and runs named in several places, and the bodies of docs/explorer.md."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from explorer_service.feedback_limits import SLICE_COST
from shared.ledger import queries, transitions
from tests.support.processes import REPOSITORY
from tests.support.samples import sample
from tests.support.servers import RunningExplorer

PAGE = (REPOSITORY / "docs" / "explorer.md").read_text(encoding="utf-8")
TASK, RUN = "X-Flywheel-Task", "X-Flywheel-Run"
HELLO = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}


def say(explorer: RunningExplorer, **body: Any) -> dict[str, Any]:
    answer = explorer.http.post("/feedback", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def rows_of(explorer: RunningExplorer, task: str) -> list[dict[str, Any]]:
    return list(explorer.http.get("/runs", params={"task_id": task}).json()["rows"])


def test_every_body_of_feedback_on_the_page_is_taken(explorer):
    block = re.search(r"<!-- feedback -->\n+```json\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    run = {"task_id": "TASK", "run_id": "RUN"}
    ids = {name: explorer.chat(model="agent", metadata=run).json()["id"] for name in ("ID", "OTHER")}
    kinds: set[str] = set()
    for line in block[1].splitlines():
        body = json.loads(re.sub(r'"(ID|OTHER)"', lambda found: f'"{ids[found[1]]}"', line))
        assert say(explorer, **body)["applied"] >= 1, line
        kinds |= body.keys() - {"msg_ids", "task_id", "run_id"}
    assert kinds == {*("reward", "rating", "metrics", "comment", "correction"), *("preferred_over", "each", "scope")}


def test_a_choice_is_named_by_its_number_and_the_bare_id_is_all_of_them(explorer):
    msg_id = explorer.chat(model="agent", n=3, metadata={"task_id": "t"}).json()["id"]
    assert [row["msg_id"] for row in rows_of(explorer, "t")] == [f"{msg_id}#{choice}" for choice in range(3)]
    for number in range(3):
        assert say(explorer, msg_ids=[f"{msg_id}#{number}"], reward=number / 4)["applied"] == 1
    assert [row["reward"] for row in rows_of(explorer, "t")] == [0.0, 0.25, 0.5]
    answer = say(explorer, msg_ids=[msg_id], reward=1)
    assert answer["applied"] == 1 and [one["msg_id"] for one in answer["receipts"]] == [msg_id]
    assert [row["reward"] for row in rows_of(explorer, "t")] == [1, 1, 1]


def test_messages_of_many_choices_cost_as_many_rows(explorer, monkeypatch):
    """Nobody's chat waits for thousands of rows that a few ids name, or for what was said of other choices."""
    names, sizes, apply_to = [f"chatcmpl-{number}" for number in range(20)], [], transitions.apply_to
    with explorer.ledger.write() as connection:
        transitions.record(connection, [sample(name, choice=choice) for name in names for choice in range(16)])

    def apply_counted(connection, targets, feedback):
        sizes.append(sum(map(len, targets.values())))
        return apply_to(connection, targets, feedback)

    monkeypatch.setattr(transitions, "apply_to", apply_counted)
    for state in ("applied", "duplicate"):
        answer = say(explorer, msg_ids=names, reward=1)
        assert [one["state"] for one in answer["receipts"]] == [state] * 20
        assert len(sizes) > 1 and sum(sizes) == 320 and max(sizes) <= SLICE_COST
        sizes.clear()
    say(explorer, msg_ids=names[:1], reward=0.5)
    assert sizes == [16]

    class Counted:
        def __init__(self, connection):
            self.connection, self.read = connection, 0

        def execute(self, query):
            found = self.connection.execute(query).all()
            self.read += len(found)
            return SimpleNamespace(all=lambda: found)

    with explorer.ledger.read() as connection:
        counted = Counted(connection)
        (log,) = queries.load_signals(counted, [sample(names[0], choice=3)]).values()
    assert [signal.value for signal in log] == [1, 0.5] and counted.read == 2


@pytest.mark.parametrize(
    ("path", "headers", "metadata", "named"),
    [
        ("/run/path/1", {TASK: "header", RUN: "2"}, {"task_id": "metadata", "run_id": "3"}, ("path", "1")),
        ("", {TASK: "header", RUN: "2"}, {"task_id": "metadata", "run_id": "3"}, ("header", "2")),
        ("", {TASK: "header"}, {"task_id": "metadata", "run_id": "3"}, ("header", "3")),
        ("", {TASK: ""}, {"task_id": "metadata", "run_id": "3"}, ("metadata", "3")),
    ],
)
def test_the_base_url_wins_over_headers_and_these_over_metadata(explorer, path, headers, metadata, named):
    chat = {**HELLO, "metadata": metadata}
    msg_id = explorer.http.post(f"{path}/v1/chat/completions", json=chat, headers=headers).json()["id"]
    say(explorer, msg_ids=[msg_id], task_id="feedback", run_id="4", reward=1)
    task, run = named
    assert [(row["msg_id"], row["run_id"]) for row in rows_of(explorer, task)] == [(msg_id, run)]


def test_a_run_without_a_task_is_reached_by_message_ids_alone(explorer):
    msg_id = explorer.http.post("/v1/chat/completions", json=HELLO, headers={RUN: "1"}).json()["id"]
    assert explorer.http.post("/feedback", json={"run_id": "1", "reward": 1}).status_code == 400
    assert explorer.http.get("/runs", params={"run_id": "1"}).status_code == 400
    say(explorer, msg_ids=[msg_id], task_id="t", reward=1)
    assert [(row["msg_id"], row["run_id"]) for row in rows_of(explorer, "t")] == [(msg_id, "1")]
