"""Whatever a caller sends, the answer is never a 5xx, an error has OpenAI's shape, and nothing breaks after."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from explorer_service.engines import admin
from tests.support.forms import FULL
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer, make_config

CASES = 5000 if FULL else 250
POSTS = ["/v1/chat/completions", "/chat", "/v1/completions", "/feedback", "/commit", "/v1/responses", "/tokenize"]

numbers = st.one_of(
    st.integers(-(10**30), 10**30), st.floats(), st.sampled_from([1e308, -1e308, 5e-324, 2**63, -(2**63)])
)
scalars = st.one_of(
    st.none(), st.booleans(), numbers, st.text(max_size=20), st.sampled_from(["", "\x00", "'; DROP TABLE x", "😀" * 9])
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
FIELDS = [
    "model", "messages", "stream", "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens",
    "logprobs", "top_logprobs", "tools", "metadata", "store", "return_token_ids", "stream_options", "prompt", "input",
    "msg_ids", "reward", "rating", "metrics", "comment", "correction", "preferred_over", "scope", "task_id", "run_id",
    "time_threshold",
]  # fmt: skip
likely = st.sampled_from(
    [None, True, False, "agent", "agent@0", "agent@99999999999", 1, 0.5, "up", "conversation", "t", [], {}, ["x"],
     {"a": 1}, [{"role": "user", "content": "hi"}], [{"role": "assistant", "tool_calls": [{"function": None}]}],
     {"task_id": 3}]
)  # fmt: skip
bodies = st.dictionaries(st.sampled_from(FIELDS), likely | values, max_size=7)


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningExplorer]:
    engine = ScriptedEngine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admin, "HEALTH_TIMEOUT_S", 60.0)  # as in start_explorer
        config = make_config(tmp_path_factory.mktemp("fuzz"), [engine.url], engine_wait_s=60.0)
        running = RunningExplorer(config).wait_ready()
        yield running
        assert running.chat().status_code == 200, "after all that it serves"
        assert running.http.get("/ready").status_code == 200
        running.stop()
    engine.stop()


def check(reply: httpx.Response) -> None:
    assert reply.status_code < 500, (reply.status_code, reply.text)
    if reply.status_code >= 400 and reply.headers.get("content-type", "").startswith("application/json"):
        error = reply.json()["error"]
        assert isinstance(error["message"], str) and {"type", "param", "code"} <= error.keys()


def encode(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")  # NaN and Infinity as they come


@settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(POSTS), body=bodies)
def test_no_json_object_breaks_anything(explorer, path, body):
    check(explorer.http.post(path, content=encode(body)))


@pytest.mark.parametrize("value", ["x", "", True, False, 5, 0, [1], [], {}, {"choice": ["a"]}, None])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_structured_outputs_that_are_no_object_are_a_400_and_never_reach_vllm_which_answers_500(explorer, path, value):
    sent = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    reply = explorer.http.post(path, json={**sent, "structured_outputs": value})
    check(reply)
    assert reply.status_code == (200 if value is None or isinstance(value, dict) else 400), reply.text
    assert reply.status_code == 200 or reply.json()["error"]["param"] == "structured_outputs"


@pytest.mark.parametrize("value", ["maybe", "", 2, 1.5, {}, []])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_chat_is_not_left_out_of_the_ledger_because_store_is_no_boolean(explorer, path, value):
    reply = explorer.http.post(path, json={"messages": [], "prompt": "hi", "store": value})
    check(reply)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "store")


FLAT = {"type": "function", "name": "f", "parameters": {}}  # as POST /v1/responses has it


@pytest.mark.parametrize("tools", [[FLAT], [{}], [{"type": "function", "function": {}}], [5]])
def test_tools_without_names_are_a_400_if_one_is_chosen_and_never_reach_vllm_which_answers_500(explorer, tools):
    chosen = {"type": "function", "function": {"name": "f"}}
    reply = explorer.http.post("/chat", json={"messages": [], "tools": tools, "tool_choice": chosen})
    check(reply)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/tokenize", "/detokenize"])
def test_a_route_that_the_engine_lacks_is_an_error_of_the_same_shape(explorer, path):
    reply = explorer.http.post(path, json={})
    assert (reply.status_code, reply.headers["content-type"]) == (404, "application/json")
    check(reply)


@settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(POSTS), body=st.one_of(values.map(encode), st.binary(max_size=60)))
def test_no_bytes_break_anything(explorer, path, body):
    check(explorer.http.post(path, content=body))


header_values = st.text(st.characters(min_codepoint=33, max_codepoint=255), max_size=30).map(
    lambda text: text.encode("latin-1")
)


@settings(max_examples=CASES // 2, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    headers=st.dictionaries(
        st.sampled_from(
            ["authorization", "x-flywheel-task", "x-flywheel-run", "idempotency-key", "x-request-id", "accept"]
        ),
        header_values,
    ),
    path=st.sampled_from(POSTS),
)
def test_no_header_breaks_anything(explorer, headers, path):
    body = {"messages": [], "prompt": "x", "msg_ids": ["x"], "reward": 1}
    check(explorer.http.post(path, json=body, headers=headers))


PATHS = st.text(st.sampled_from("abv1/.%2e%2F;?@\\chat0-_~"), max_size=30)


@settings(max_examples=CASES // 2, deadline=None, suppress_health_check=list(HealthCheck))
@given(method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]), path=PATHS)
def test_no_path_breaks_anything(explorer, method, path):
    reply = explorer.http.request(method, httpx.URL(explorer.url, raw_path=b"/" + path.encode()))
    assert reply.status_code < 500 or reply.status_code == 501


ENGINE_ROUTES = [
    "/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/sleep", "/wake_up", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter", "/weight_info", "/update_weight_version", "/server_info", "/inference/v1/generate",
    "/v1/chat/completions/render", "/v1/embeddings", "/invocations", "/docs", "/openapi.json",
]  # fmt: skip


@pytest.mark.parametrize("route", ENGINE_ROUTES)
def test_the_engines_administration_is_not_reachable(explorer, route):
    tricks = [
        route,
        "/v1/.." + route,
        "/chat/.." + route,
        "/" + route,
        "/v1/chat/completions/.." + route,
        "/%2e" + route,
    ]
    for path in tricks:
        for method in ("GET", "POST"):
            reply = explorer.http.request(method, httpx.URL(explorer.url, raw_path=path.encode()), json={})
            assert reply.status_code in (404, 405), (method, path, reply.status_code)
    reply = explorer.http.post("/health", headers={"Host": "engine:8101"}, json={})
    assert reply.status_code == 403


def test_a_deep_body_is_refused_and_not_a_crash(explorer):
    for depth in (100, 5_000, 200_000):
        body = b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"
        assert explorer.http.post("/chat", content=body).status_code in (200, 400)


def test_a_huge_body_is_refused(explorer):
    limit = explorer.config.explorer.max_body_bytes
    assert explorer.http.post("/chat", content=b'{"x": "' + b"a" * limit + b'"}').status_code == 413


def test_sql_in_ids_is_only_text(explorer):
    name = "x'; DROP TABLE experiences; --"
    said = {"task_id": name, "run_id": name}
    known = explorer.chat(metadata=said).json()["id"]
    assert explorer.http.post("/feedback", json={**said, "reward": 1}).json()["receipts"][0]["msg_id"] == known
    assert explorer.http.post("/feedback", json={"msg_ids": [name, name + "#1"], "reward": 1}).status_code == 404


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e309", "9" * 400, '"1"', "true", "[]"])
def test_a_number_that_is_not_finite_is_refused(explorer, number):
    known = explorer.chat().json()["id"]
    bodies = [
        f'{{"msg_ids": ["{known}"], {given}}}' for given in (f'"reward": {number}', f'"metrics": {{"a": {number}}}')
    ]
    assert [explorer.http.post("/feedback", content=body).status_code for body in bodies] == [400, 400]
    assert explorer.http.post("/commit", content=f'{{"time_threshold": {number}}}').status_code == 400


def test_a_reward_at_the_edge_of_numbers_is_refused_and_one_in_the_ledger_is_never_trained_on(explorer):
    from shared.ledger import queries, transitions
    from shared.ledger.tables import experiences

    known = explorer.chat().json()["id"]
    assert explorer.http.post("/feedback", json={"msg_ids": [known], "reward": 1e308}).status_code == 400
    assert explorer.http.post("/feedback", json={"msg_ids": [known], "reward": 100}).status_code == 200
    with explorer.ledger.write() as connection:
        connection.execute(experiences.update().where(experiences.c.msg_id == known).values(reward=1e308))
    explorer.http.post("/commit")
    with explorer.ledger.write() as connection:
        batch = transitions.claim(connection, owner="t", at_least=1, at_most=100_000, lease_s=60)
        lease = queries.load_lease(connection, batch)
    assert any("beyond" in reason for reason in lease.corrupt.values())
    assert all(abs(row.reward) <= 1e6 for row in lease.rows)
