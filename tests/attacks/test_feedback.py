"""Feedback that says too much, or about too many: it is bounded, and nobody else waits for it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from sqlalchemy import event, func, insert, select, text, update

from shared.errors import TooManyTargets
from shared.ledger import queries, transitions
from shared.ledger.conditions import MAX_PARAMETERS
from shared.ledger.connect import Ledger
from shared.ledger.queries.explorers import LIVE_S
from shared.ledger.tables import experiences, explorers, open_streams, payloads, signals
from shared.ledger.transitions.feedback import MAX_SIGNALS
from tests.support.forms import FULL, one_database
from tests.support.processes import wait_for, write_config
from tests.support.samples import record
from tests.support.servers import RunningExplorer, free_port, make_config, wait_until
from tests.support.standstill import OwnClock

TARGETS = 10_000 if FULL else 2_500
CHATS_BESIDE = TARGETS // 250  # in the time that the feedback takes; none would be answered if chats waited for it
ROWS_OF_A_TASK = 66_000 if FULL else 3_000  # PostgreSQL takes 65,535 parameters


def feedback(explorer: RunningExplorer, **body: Any) -> httpx.Response:
    return explorer.http.post("/feedback", json=body)


class Customers:
    """Callers who chat one after the other: how many chats were answered, and which failed."""

    def __init__(self, url: str, count: int = 4) -> None:
        self._url = url
        self._enough = threading.Event()
        self.answered = 0
        self.failed: list[str] = []
        self._threads = [threading.Thread(target=self._chat) for _ in range(count)]

    def _chat(self) -> None:
        with httpx.Client(base_url=self._url, timeout=30) as http:
            while not self._enough.wait(0.01):
                reply = http.post("/chat", json={"messages": [{"role": "user", "content": "hi"}]})
                self.answered += 1
                if reply.status_code != 200:
                    self.failed.append(reply.text)

    def __enter__(self) -> Customers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join()


def test_ten_thousand_targets_are_applied_beside_chats_and_not_before_them(
    scripted_engine, lives, tmp_path, database_url
):
    """In the short form there are fewer targets."""
    config = make_config(tmp_path, [scripted_engine.url], database_url=database_url, port=free_port())
    file, url = write_config(config, tmp_path / "flywheel.yaml"), f"http://127.0.0.1:{config.explorer.port}"
    ledger = Ledger.open(config.ledger_url)
    names = record(ledger, TARGETS)
    with lives.begin(["explorer", "-c", str(file)], tmp_path / "explorer.log") as process:
        wait_for(lambda: "listening" in process.output(), "a listening explorer", 240)
        wait_for(lambda: httpx.get(url + "/ready", timeout=60).status_code == 200, "service", 240)
        with Customers(url) as customers:
            wait_for(lambda: customers.answered, "a chat")
            nobody = [f"nobody-{number}" for number in range(TARGETS)]
            for targets, times in ((names, 1), (nobody, 5)):  # one of nobody is over within a stall of the disk
                before = customers.answered
                for _ in range(times):
                    reply = httpx.post(url + "/feedback", json={"msg_ids": targets, "reward": 1}, timeout=300)
                    assert len(reply.json()["receipts"]) == TARGETS
                assert customers.answered - before >= times * CHATS_BESIDE
    assert not customers.failed
    with ledger.read() as connection:
        rewarded = select(func.count()).where(experiences.c.reward == 1)
        assert connection.execute(rewarded).scalar() == TARGETS
        assert connection.execute(select(func.count()).select_from(signals)).scalar() == TARGETS
    ledger.close()


def test_a_task_of_more_rows_than_a_statement_has_parameters_is_found_whole(scripted_engine, postgres, tmp_path):
    """In the short form by the number of parameters: no statement has more for more rows."""
    config, rows = make_config(tmp_path, [scripted_engine.url], database_url=postgres.new_database()), ROWS_OF_A_TASK
    explorer = RunningExplorer(config).wait_ready()
    given: list[int] = []

    def note(_connection: object, _cursor: object, _statement: str, parameters: Any, _: object, many: bool) -> None:
        given.extend(map(len, parameters if many else [parameters]))

    fill = (
        "INSERT INTO experiences (msg_id, choice, conversation_id, task_id, version, version_end, state, reward,"
        " teaches, n_prompt, n_reply, temperature, top_p, top_k, min_p, created_at) SELECT 'm' || n, 0, 'm' || n,"
        " 'large', 0, 0, 'RECORDED', 1, 1, 1, 1, 1, 1, 0, 0, 0 FROM generate_series(CAST(:first AS integer), :last) n"
    )
    try:
        for first in range(1, rows, 3_000):  # each well within the explorer's patience
            with explorer.ledger.write() as connection:
                connection.execute(text(fill), {"first": first, "last": first + 2_999})
                connection.exec_driver_sql("ANALYZE experiences")  # as PostgreSQL does by itself within a minute
        event.listen(explorer.ledger._engine, "before_cursor_execute", note)
        with explorer.ledger.read() as connection:
            scope: dict[str, Any] = {"msg_ids": [], "task_id": "large", "run_id": None, "conversations": True}
            assert len(queries.find_targets(connection, **scope)) == rows
            with pytest.raises(TooManyTargets):
                queries.find_targets(connection, **scope, at_most=rows - 1)
        answer = explorer.http.post("/commit", timeout=300).json()
        assert (answer["committed"], answer["ready"]) == (rows, rows)
        assert rows > 2 * MAX_PARAMETERS and MAX_PARAMETERS <= max(given) < MAX_PARAMETERS + 50
    finally:
        explorer.stop()


@one_database
def test_feedback_that_is_too_much_is_refused(explorer):
    known = explorer.chat().json()["id"]
    for said, param in (
        ({"metrics": {f"m{n}": 1 for n in range(101)}}, "metrics"),
        ({"metrics": {"m" * 201: 1}}, "metrics"),
        ({"preferred_over": [f"m{n}" for n in range(101)]}, "preferred_over"),
        ({"preferred_over": ["m" * 300]}, "preferred_over"),
        ({"comment": "x" * 70_000}, "comment"),
        ({"correction": "ü" * 40_000}, "correction"),
        ({"reward": 1, "msg_ids": ["m" * 300]}, "msg_ids"),
        ({"reward": 1, "msg_ids": [f"m{n}" for n in range(10_001)]}, "msg_ids"),
    ):
        reply = feedback(explorer, **{"msg_ids": [known], **said})
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == param


def test_a_comment_on_a_large_task_is_refused_before_it_fills_the_disk(explorer):
    record(explorer.ledger, 300, task_id="t")
    reply = feedback(explorer, task_id="t", comment="x" * 64_000)
    assert reply.status_code == 400
    assert "name fewer messages" in reply.json()["error"]["message"]
    assert feedback(explorer, task_id="t", comment="x" * 1_000).json()["applied"] == 300


def test_names_of_metrics_on_a_large_task_are_refused_before_they_fill_the_disk(explorer):
    record(explorer.ledger, 500, task_id="t")
    reply = feedback(explorer, task_id="t", metrics={f"{n:03}" + "ü" * 197: 1 for n in range(100)})
    assert reply.status_code == 400, reply.text
    assert "name fewer messages" in reply.json()["error"]["message"]


def test_a_row_about_which_enough_was_said_takes_no_more(explorer):
    known, other = (explorer.chat().json()["id"] for _ in range(2))
    for part in range(MAX_SIGNALS // 100):
        metrics = {f"m{part}-{number}": 1 for number in range(100)}
        assert feedback(explorer, msg_ids=[known], metrics=metrics).status_code == 200
    reply = feedback(explorer, msg_ids=[other, known], reward=1)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "too_many_signals")
    assert feedback(explorer, msg_ids=[other], reward=1).json()["receipts"][0]["state"] == "applied"


def test_a_request_is_stored_once_and_not_once_a_choice(explorer):
    reply = explorer.chat(n=8, user="u" * 100_000).json()
    with explorer.ledger.read() as connection:
        texts = connection.execute(select(payloads.c.request)).scalars().all()
    assert len(texts) == len(reply["choices"]) == 8
    assert sum(len(one or b"") for one in texts) < 110_000


def test_a_chat_of_too_many_choices_is_refused(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], max_choices=4).wait_ready()
    assert explorer.chat(n=4).status_code == 200
    assert explorer.chat(n=5).status_code == 400
    several = explorer.http.post("/v1/completions", json={"prompt": ["a"] * 3, "n": 2})
    assert (several.status_code, several.json()["error"]["param"]) == (400, "n")


def test_feedback_does_not_wait_for_ever_for_another_explorers_stream(scripted_engine, start_explorer, tmp_path):
    clock = OwnClock()
    explorer = start_explorer([scripted_engine.url], request_timeout_s=1).wait_ready()
    enough = threading.Event()

    def live() -> None:
        """As another explorer, whose stream does not end, and whose heartbeat is not old when this one is late."""
        later = update(explorers).where(explorers.c.id == "other")
        while not enough.is_set():
            with explorer.ledger.write() as connection:
                transitions.heartbeat(connection, "other", {})
                connection.execute(later.values(heartbeat_at=time.time() + 0.9 * LIVE_S))
            enough.wait(0.5)

    with explorer.ledger.write() as connection:
        connection.execute(insert(open_streams).values(msg_id="chatcmpl-open", explorer="other"))
    other = threading.Thread(target=live)
    other.start()
    try:
        wait_until(lambda: not explorer.deps.membership.is_alone)
        clock.start(tmp_path)
        began = clock.now()
        reply = feedback(explorer, msg_ids=["chatcmpl-open"], reward=1)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "stream_open")
        assert clock.now() - began < 5
    finally:
        clock.stop()
        enough.set()
        other.join()


@pytest.mark.parametrize("depth", [980, 5000])
def test_arguments_of_any_depth_are_never_a_500(explorer, depth):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" * depth + "]" * depth}}
    said = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "go on"}]
    assert explorer.chat(messages=said).status_code == 200
    nested: Any = json.loads("[" * 900 + "]" * 900)
    assert explorer.chat(messages=[{"role": "user", "content": nested}]).status_code in (200, 400)


def test_what_an_engine_replies_is_recorded_or_refused_and_never_a_500(explorer, scripted_engine):
    arguments = "[" * 980 + "]" * 980
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    scripted_engine.script.message = {"tool_calls": [call]}
    msg_id = explorer.chat().json()["id"]
    with explorer.ledger.read() as connection:
        assert connection.execute(select(experiences.c.msg_id)).scalar() == msg_id
    for large in (2**31, 2**63, 2**70):
        scripted_engine.script.reply_ids = [11, large, 13]
        reply = explorer.chat()
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_reply"), reply.text


def test_who_has_no_key_learns_nothing_of_the_inside_and_costs_nothing(scripted_engine, start_explorer, monkeypatch):
    for role in ("chat", "admin"):
        monkeypatch.setenv(f"KEY_{role}", f"the-secret-of-{role}")
    monkeypatch.setattr("explorer_service.metrics._MAX_AGE_S", 600.0)  # the hundred requests may take a while
    keys = [{"key_env": f"KEY_{role}", "role": role} for role in ("chat", "admin")]
    explorer = start_explorer([scripted_engine.url], keys=keys, reload={"poll_interval_s": 5.0}).wait_ready()
    asked = counted(explorer, lambda: [explorer.http.get(path) for path in ("/ready", "/metrics") for _ in range(50)])
    assert asked < 50, "of 100 requests"
    scripted_engine.script.healthy = False
    wait_until(lambda: explorer.http.get("/ready").status_code == 503)
    assert scripted_engine.url.partition("://")[2] not in explorer.http.get("/ready").text
    by_chat, by_admin = (
        explorer.http.get("/status", headers={"Authorization": f"Bearer the-secret-of-{role}"}).json()["engines"][0]
        for role in ("chat", "admin")
    )
    assert scripted_engine.url.partition("://")[2] not in json.dumps(by_chat)
    assert by_admin["url"] == scripted_engine.url


def counted(explorer: RunningExplorer, ask: Callable[[], object]) -> int:
    """Statements while these are asked; the heartbeat's among them."""
    statements: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    event.listen(explorer.ledger._engine, "before_cursor_execute", note)
    ask()
    event.remove(explorer.ledger._engine, "before_cursor_execute", note)
    return len([statement for statement in statements if "explorers" not in statement and "engines" not in statement])
