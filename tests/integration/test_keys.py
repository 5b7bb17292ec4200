"""Keys over real HTTP: groups, hashed keys, limits."""

from __future__ import annotations

import hashlib
import threading
from functools import partial

import pytest
from starlette.requests import HTTPConnection

from explorer_service.api.auth import Auth, doubtful_keys
from explorer_service.api.errors import ApiError
from explorer_service.api.limits import Limit
from shared.config import ExplorerConfig
from shared.ledger.conditions import UNGROUPED
from tests.support.forms import one_database
from tests.support.servers import publish, wait_until
from tests.support.wire import connect, post

pytestmark = [pytest.mark.usefixtures("patient_health"), one_database]
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def as_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def hashed(name: str, role: str, **more) -> dict[str, object]:
    return {"sha256": hashlib.sha256(name.encode()).hexdigest(), "role": role, "name": name, **more}


@pytest.fixture
def within_a_minute(monkeypatch):
    """However long the requests take: a key regains requests with time."""
    monkeypatch.setattr("explorer_service.api.auth.Limit", partial(Limit, clock=lambda: 0.0))


def test_feedback_does_not_reach_another_groups_rows(scripted_engine, start_explorer):
    keys = [
        hashed("chat-a", "chat", group="a"),
        hashed("rate-a", "feedback", group="a"),
        hashed("rate-b", "feedback", group="b"),
        hashed("all", "admin"),
    ]
    explorer = start_explorer([scripted_engine.url], keys=keys).wait_ready()
    message = explorer.http.post(
        "/v1/chat/completions", json={**CHAT, "metadata": {"task_id": "t"}}, headers=as_key("chat-a")
    ).json()["id"]

    def rate(key: str, **target: object):
        return explorer.http.post("/feedback", json={**target, "reward": 1}, headers=as_key(key))

    for target in ({"msg_ids": [message]}, {"task_id": "t"}, {"msg_ids": [message], "scope": "conversation"}):
        assert rate("rate-b", **target).status_code == 404
    assert rate("rate-a", msg_ids=[message]).json()["applied"] == 1
    commits = [explorer.http.post("/commit", headers=as_key(key)).json()["committed"] for key in ("rate-b", "rate-a")]
    assert commits == [0, 1]
    assert rate("all", task_id="t").json()["receipts"][0]["state"] in ("updated", "duplicate")


@pytest.mark.usefixtures("within_a_minute")
def test_a_key_that_asks_too_often_gets_429_with_retry_after(scripted_engine, start_explorer):
    keys = [hashed("chat", "chat", requests_per_minute=2), hashed("other", "chat")]
    explorer = start_explorer([scripted_engine.url], keys=keys).wait_ready()
    answers = [explorer.http.post("/chat", json=CHAT, headers=as_key("chat")) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert int(answers[2].headers["Retry-After"]) >= 1
    assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
    assert explorer.http.post("/chat", json=CHAT, headers=as_key("other")).status_code == 200


def test_a_key_has_only_so_many_requests_at_once_streams_included(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], keys=[hashed("chat", "chat", requests_at_once=1)]).wait_ready()
    scripted_engine.script.stream_slowly()
    began = threading.Event()

    def stream() -> None:
        with explorer.http.stream("POST", "/chat", json={**CHAT, "stream": True}, headers=as_key("chat")) as reply:
            for _line in reply.iter_lines():
                began.set()

    running = threading.Thread(target=stream)
    running.start()
    assert began.wait(240)
    assert explorer.http.post("/chat", json=CHAT, headers=as_key("chat")).status_code == 429
    scripted_engine.script.gap_s = 0.0
    running.join(240)
    wait_until(lambda: explorer.http.post("/chat", json=CHAT, headers=as_key("chat")).status_code == 200)


def test_feedback_whose_caller_leaves_while_it_waits_for_a_stream_holds_nothing(scripted_engine, start_explorer):
    keys = [hashed("chat", "chat"), hashed("rate", "feedback", requests_at_once=1)]
    explorer = start_explorer([scripted_engine.url], keys=keys).wait_ready()
    scripted_engine.script.stream_slowly()
    (limit,) = (key.caller.limit for key in explorer.deps.auth._keys if key.role == "feedback")
    asked = {**CHAT, "stream": True, "metadata": {"task_id": "t"}}

    def rate(**body) -> int:
        return explorer.http.post("/feedback", json={"reward": 1, **body}, headers=as_key("rate")).status_code

    with explorer.http.stream("POST", "/chat", json=asked, headers=as_key("chat")) as stream:
        lines = stream.iter_lines()
        next(lines)
        with connect(explorer, post("/feedback", b'{"task_id": "t", "reward": 1}', "Authorization: Bearer rate")):
            wait_until(lambda: limit.in_flight == 1)  # a request before would leave it no room
            assert rate(msg_ids=["x"]) == 429
        wait_until(lambda: rate(msg_ids=["x"]) == 404)
        assert scripted_engine.script.events < 3000, "the stream goes on"


@pytest.mark.usefixtures("within_a_minute")
def test_reading_the_status_is_limited_for_each_key_and_takes_nothing_from_its_chats(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], keys=[hashed("chat", "chat", requests_per_minute=2)]).wait_ready()
    found = [explorer.http.get(path, headers=as_key("chat")).status_code for path in ("/status", "/versions") * 2]
    assert found == [200, 200, 429, 429]
    assert explorer.http.post("/chat", json=CHAT, headers=as_key("chat")).status_code == 200


@pytest.mark.usefixtures("within_a_minute")
def test_requests_for_an_unknown_model_count_against_the_key(scripted_engine, start_explorer):
    keys = [hashed("chat", "chat", requests_per_minute=2)]
    explorer = start_explorer([scripted_engine.url], keys=keys).wait_ready()
    unknown = [explorer.http.post("/chat", json={**CHAT, "model": "x"}, headers=as_key("chat")) for _ in range(3)]
    assert [answer.status_code for answer in unknown] == [404, 404, 429]


def test_a_key_may_hold_any_character(scripted_engine, start_explorer):
    explorer = start_explorer(
        [scripted_engine.url], keys=[{**hashed("schlüssel-voilà", "chat"), "name": "k"}]
    ).wait_ready()
    key = {"Authorization": b"Bearer " + "schlüssel-voilà".encode()}
    assert explorer.http.post("/chat", json=CHAT, headers=key).status_code == 200


def test_a_task_named_in_a_header_is_the_same_as_in_json(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url]).wait_ready()
    for number, raw in enumerate(["übung".encode(), "übung".encode("latin-1")], 1):
        named = {"X-Flywheel-Task": raw, "X-Flywheel-Run": b"%d" % number}
        assert explorer.http.post("/chat", json=CHAT, headers=named).status_code == 200
        signal = {"task_id": "übung", "run_id": str(number), "reward": 1}
        assert explorer.http.post("/feedback", json=signal).json()["applied"] == 1


def test_a_feedback_key_reaches_its_own_group_unless_told_otherwise(scripted_engine, start_explorer):
    keys = [
        hashed("chat-a", "chat", group="a"),
        hashed("chat", "chat"),
        hashed("rate", "feedback"),
        hashed("rate-all", "feedback", all_groups=True),
    ]
    explorer = start_explorer([scripted_engine.url], keys=keys, open_feedback_from=["127.0.0.0/8"]).wait_ready()
    named = {**CHAT, "metadata": {"task_id": "t"}}
    grouped, plain = (
        explorer.http.post("/chat", json=named, headers=as_key(k)).json()["id"] for k in ("chat-a", "chat")
    )

    def reached(**headers: str) -> set[str]:
        answer = explorer.http.post("/feedback", json={"task_id": "t", "reward": 1}, headers=headers).json()
        return {receipt["msg_id"] for receipt in answer["receipts"]}

    def committed(**headers: str) -> int:
        return explorer.http.post("/commit", headers=headers).json()["committed"]

    assert reached() == reached(**as_key("rate")) == {plain}
    assert reached(**as_key("rate-all")) == {plain, grouped}
    assert (committed(), committed(**as_key("rate")), committed(**as_key("rate-all"))) == (1, 0, 1)


def test_a_feedback_key_that_reaches_nothing_is_named_at_the_start():
    chat, rate = hashed("chat-a", "chat", group="a"), hashed("rate", "feedback")
    (doubt,) = doubtful_keys(ExplorerConfig.model_validate({"keys": [chat, rate]}))
    assert "'rate' has no group" in doubt
    for other in (hashed("rate", "feedback", group="a"), hashed("rate", "feedback", all_groups=True)):
        assert not doubtful_keys(ExplorerConfig.model_validate({"keys": [chat, other]}))
    assert not doubtful_keys(ExplorerConfig.model_validate({"keys": [hashed("chat", "chat"), rate]}))
    (doubt,) = doubtful_keys(ExplorerConfig.model_validate({"keys": [chat, hashed("rate", "feedback", group="b")]}))
    assert "'rate' has group 'b'" in doubt


def test_engines_addresses_are_for_admins_alone(scripted_engine, start_explorer):
    keys = [hashed("chat", "chat"), hashed("root", "admin")]
    explorer = start_explorer([scripted_engine.url], keys=keys).wait_ready()
    scripted_engine.script.wrong_probe_for.add("v000002")
    for version in (0, 1, 2):
        publish(explorer, version)

    def reason(**headers: str) -> str:
        versions = explorer.http.get("/versions", headers=headers).json()["versions"]
        return str(versions[-1]["reason"])

    wait_until(lambda: "computes other logprobs" in reason(**as_key("root")))
    assert scripted_engine.url in reason(**as_key("root"))
    assert scripted_engine.url not in reason(**as_key("chat")) and "(its address)" in reason(**as_key("chat"))


def test_a_caller_of_ipv4_is_in_its_open_network_also_if_the_explorer_listens_on_ipv6():
    auth = Auth(ExplorerConfig(keys=[hashed("chat", "chat")], open_feedback_from=["10.0.0.0/8"]))

    def group_of(address: str) -> str | None:
        request = HTTPConnection({"type": "http", "headers": [], "client": (address, 50_000)})
        return auth.require(request, "feedback", open_to_networks=True).group

    assert group_of("10.1.2.3") == group_of("::ffff:10.1.2.3") == UNGROUPED
    for stranger in ("11.1.2.3", "::ffff:11.1.2.3", "::10.1.2.3", "fd00::1"):
        with pytest.raises(ApiError):
            group_of(stranger)


def test_a_proxy_on_this_machine_names_its_caller_also_if_the_explorer_listens_on_ipv6(scripted_engine, start_explorer):
    keys, networks = [hashed("chat", "chat")], ["127.0.0.0/8", "10.0.0.0/8"]
    explorer = start_explorer([scripted_engine.url], host="::", keys=keys, open_feedback_from=networks).wait_ready()

    def status_of(caller: str) -> int:
        body = {"msg_ids": ["chatcmpl-1"], "reward": 1}
        return explorer.http.post("/feedback", json=body, headers={"X-Forwarded-For": caller}).status_code

    assert (status_of("10.1.2.3"), status_of("203.0.113.9")) == (404, 401)
