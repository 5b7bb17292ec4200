"""Chat and record, over real HTTP, with a scripted engine behind."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import numpy as np
from sqlalchemy import select

from shared.experience import Tokens
from shared.ledger.tables import experiences, payloads
from tests.support.forms import one_database
from tests.support.servers import RunningExplorer, wait_until
from tests.support.waiting_feedback import feedback_that_waits

pytestmark = one_database


def rows(explorer: RunningExplorer) -> list[dict]:
    with explorer.ledger.read() as connection:
        query = select(experiences, payloads).join(payloads, payloads.c.experience_id == experiences.c.id)
        return [dict(row._mapping) for row in connection.execute(query.order_by(experiences.c.id))]


def stream_events(explorer: RunningExplorer, **body: object) -> tuple[dict[str, str], list[str]]:
    request = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **body}
    with explorer.http.stream("POST", "/v1/chat/completions", json=request) as reply:
        return dict(reply.headers), [line for line in reply.iter_lines() if line]


def test_a_chat_is_recorded_with_exact_tokens_and_the_samplers_logprobs(explorer, scripted_engine):
    reply = explorer.chat(model="agent", temperature=0.7, top_p=0.9)
    assert reply.status_code == 200
    assert reply.headers["X-Flywheel-Version"] == "0"
    (row,) = rows(explorer)
    tokens = Tokens.decode(row["tokens"])
    assert row["msg_id"] == reply.json()["id"]
    assert tokens.prompt_ids.tolist() == scripted_engine.script.prompt_ids
    assert tokens.reply_ids.tolist() == scripted_engine.script.reply_ids
    np.testing.assert_array_equal(tokens.logprobs, np.float32(scripted_engine.script.logprobs))
    assert (row["temperature"], row["top_p"], row["state"], row["reward"]) == (0.7, 0.9, "RECORDED", None)


def test_the_caller_gets_what_the_engine_said_and_nothing_it_did_not_ask_for(explorer):
    reply = explorer.chat(model="agent").json()
    assert reply["choices"][0]["logprobs"] is None
    assert reply["choices"][0]["token_ids"] is None
    assert reply["prompt_token_ids"] is None
    assert reply["something_new"] == {"kept": True}
    asked = explorer.chat(model="agent", logprobs=True, return_token_ids=True).json()
    assert len(asked["choices"][0]["logprobs"]["content"]) == 3
    assert asked["choices"][0]["token_ids"] == [11, 12, 13]


def test_the_callers_parameters_reach_the_engine_unchanged(explorer, scripted_engine):
    explorer.chat(temperature=0.3, seed=7, stop=["x"], future_parameter={"a": 1})
    sent = scripted_engine.script.bodies[-1]
    assert (sent["temperature"], sent["seed"], sent["stop"], sent["future_parameter"]) == (0.3, 7, ["x"], {"a": 1})


def test_each_choice_is_an_experience_of_its_own(explorer):
    reply = explorer.chat(n=3)
    recorded = rows(explorer)
    assert [row["choice"] for row in recorded] == [0, 1, 2]
    assert {row["msg_id"] for row in recorded} == {reply.json()["id"]}


def test_store_false_is_served_and_never_recorded(explorer, scripted_engine):
    assert explorer.chat(store=False).status_code == 200
    assert rows(explorer) == []
    assert "return_token_ids" not in scripted_engine.script.bodies[-1]
    _, events = stream_events(explorer, store=False)
    assert events[-1] == "data: [DONE]"
    assert rows(explorer) == []


def test_attribution_comes_from_headers_or_metadata(explorer):
    explorer.http.post(
        "/chat", json={"messages": []}, headers={"X-Flywheel-Task": "t", "X-Flywheel-Run": "r"}
    ).raise_for_status()
    explorer.chat(metadata={"task_id": "t2", "run_id": 5})
    assert [(row["task_id"], row["run_id"]) for row in rows(explorer)] == [("t", "r"), ("t2", "5")]


def test_a_stream_passes_every_event_on_and_is_recorded_before_done(explorer):
    headers, events = stream_events(explorer)
    assert headers["x-flywheel-version"] == "0"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert events[-1] == "data: [DONE]"
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "t11", "t12", "t13"]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert all(choice.get("token_ids") is None and choice["logprobs"] is None for choice in choices)
    (row,) = rows(explorer)
    assert {chunk["id"] for chunk in chunks} == {row["msg_id"]}
    assert Tokens.decode(row["tokens"]).reply_ids.tolist() == [11, 12, 13]
    assert json.loads(row["reply"]) == {"role": "assistant", "content": "t11t12t13"}


def test_a_stream_that_breaks_off_says_so_and_is_not_recorded(explorer, scripted_engine):
    scripted_engine.script.break_after_events = 2
    _, events = stream_events(explorer)
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "engine_lost"
    assert rows(explorer) == []


def test_a_stream_whose_engine_reports_an_error_is_not_recorded_though_it_is_done(explorer, scripted_engine):
    scripted_engine.script.fails_after_tokens = 1
    _, events = stream_events(explorer)
    assert '"content": "t11"' in events[1] and "engine core died" in events[2] and events[3:] == ["data: [DONE]"]
    assert rows(explorer) == []


def test_the_engines_refusal_comes_through_with_its_message(explorer):
    reply = explorer.http.post("/v1/chat/completions", json={"messages": 5})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "messages: field required"


def test_what_is_wrong_with_a_request_is_said_in_openais_shape(explorer):
    for body, status in (
        (b"{", 400),
        (b"[]", 400),
        (b"\xff\xfe", 400),
        (b'{"messages": [], "temperature": NaN}', 400),
        (b'{"messages": [], "temperature": "hot"}', 400),
        (b'{"messages": [], "metadata": []}', 400),
        (b'{"messages": [], "model": 3}', 400),
        (b'{"messages": [], "model": "gpt-4"}', 404),
        (b'{"messages": [], "model": "agent@99"}', 404),
        (b"[" * 100_000, 400),
        (b'{"messages": [], "pad": "' + b"x" * 9_000_000 + b'"}', 413),  # and the connection ends
    ):
        reply = explorer.http.post("/v1/chat/completions", content=body)
        assert reply.status_code == status, body[:60]
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}, body[:60]


def test_a_pinned_version_in_service_answers(explorer):
    assert explorer.chat(model="agent@0").status_code == 200


def test_models_are_listed_below_every_base_url_and_found_by_name(explorer):
    for base in ("", "/run/t/1", "/run/a%2Fb/c%2Fd"):
        listed = explorer.http.get(f"{base}/v1/models").json()
        assert [model["id"] for model in listed["data"]] == ["agent", "agent@0"]
        for path in ("agent@0", "agent%400"):
            assert explorer.http.get(f"{base}/v1/models/{path}").json() == listed["data"][1]
        for name in ("agent@7", "org/agent"):
            unknown = explorer.http.get(f"{base}/v1/models/{name}")
            assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")


def test_a_sample_whose_lengths_do_not_agree_is_quarantined_with_the_reason(explorer, scripted_engine):
    scripted_engine.script.logprobs = [-0.5]
    assert explorer.chat().status_code == 200
    (row,) = rows(explorer)
    reason = "quarantined: it does not have one logprob for each reply token"
    assert (row["state"], row["reason"]) == ("DISCARDED", reason)


def test_while_engines_are_away_the_answer_is_503_with_retry_after(start_explorer: Callable[..., RunningExplorer]):
    explorer = start_explorer(["http://127.0.0.1:9"])
    wait_until(lambda: "connection attempts failed" in explorer.http.get("/status").text)
    for reply in (explorer.chat(), explorer.http.get("/ready")):
        assert reply.status_code == 503
        assert int(reply.headers["Retry-After"]) > 0
    assert explorer.http.get("/health").status_code == 200


def test_an_engine_that_dies_and_comes_back_is_taken_up_again(explorer, scripted_engine):
    scripted_engine.script.healthy = False
    wait_until(lambda: explorer.http.get("/ready").status_code == 503)
    scripted_engine.script.healthy = True
    wait_until(lambda: explorer.http.get("/ready").status_code == 200)
    assert explorer.chat().status_code == 200


def test_feedback_that_overtakes_its_row_waits_for_it(explorer, scripted_engine):
    scripted_engine.script.streams_wait = True
    ids: list[str] = []
    streaming = threading.Thread(target=_collect_first_id, args=(explorer, ids))
    streaming.start()
    wait_until(lambda: bool(ids))
    with feedback_that_waits(explorer, msg_ids=ids, reward=1) as answers:
        scripted_engine.script.streams_wait = False
    streaming.join()
    assert answers[0]["receipts"] == [{"msg_id": ids[0], "state": "applied"}]


def _collect_first_id(explorer: RunningExplorer, ids: list[str]) -> None:
    body = {"messages": [], "stream": True}
    with explorer.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {") and not ids:
                ids.append(json.loads(line[6:])["id"])
