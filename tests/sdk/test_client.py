"""Client and AsyncClient: what they say, what they try again, and what they raise."""

from __future__ import annotations

import inspect
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import flywheel
import pytest
from flywheel.admin import Admin, AsyncAdmin

from tests.sdk.conftest import rows, said, say
from tests.support.servers import free_port, publish, wait_until

Answer = tuple[int, dict[str, str], bytes]
RECEIPTS = {"status": "success", "applied": 1, "receipts": [{"msg_id": "m", "state": "applied"}]}


@contextmanager
def answering(answer: Callable[[int, BaseHTTPRequestHandler], Answer | None]) -> Iterator[str]:
    """A server whose nth request is answered by `answer(n, request)`; None breaks the connection off."""
    count = iter(range(1_000_000))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.body = self.rfile.read(int(self.headers.get("content-length") or 0))
            found = answer(next(count), self)
            if found is None:
                self.connection.close()
                return
            status, headers, content = found
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(ConnectionError):  # a client that gave up
                self.wfile.write(content)

        do_GET = do_PUT = do_POST

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_reply_is_rated_rewarded_corrected_and_preferred(client, explorer):
    first, second = say(client.model()).id, say(client.model()).id
    assert client.feedback(first, reward=0.5, metrics={"steps": 3}).applied == 1
    assert client.rate(second, "up").msg_ids == [second]
    client.correct(second, "better")
    client.comment(first, "good")
    client.prefer(first, second)
    assert [row.reward for row in rows(explorer)] == [0.5, 1.0]
    assert [signal.kind for signal in said(explorer)] == [
        "reward", "metric", "rating", "correction", "comment", "preferred_over",
    ]  # fmt: skip
    assert client.commit().committed == 2
    status = client.status()
    assert (status.ready, status.serving, status.is_training) == (2, None, False)


def test_a_boolean_is_sent_as_its_number(client, explorer):
    right, wrong = say(client.model()).id, say(client.model()).id
    client.feedback(right, reward=True, metrics={"short": False})
    client.feedback(wrong, reward=False)
    with client.run("t") as run:
        say(run.model)
        run.take(flywheel.Reward(False, {"formed": True}))
    assert [row.reward for row in rows(explorer)] == [1.0, 0.0, 0.0]
    assert [(signal.name, signal.value) for signal in said(explorer) if signal.kind == "metric"] == [
        ("short", 0.0),
        ("formed", 1.0),
    ]


def test_versions_are_listed_and_the_one_in_service_is_known(client, explorer):
    publish(explorer, 1)
    wait_until(lambda: client.status().serving == 1)
    assert [(version.number, version.state) for version in client.versions()] == [(1, "SERVING")]
    assert client.status().newest == 1


async def test_the_async_client_has_the_same_methods(explorer):
    async with flywheel.AsyncClient(explorer.url) as client:
        await client.wait_ready()
        chat = client.async_openai()
        reply = await chat.chat.completions.create(model="agent", messages=[{"role": "user", "content": "hi"}])
        await client.feedback(reply.id, reward=1)
        await client.rate(reply.id, "down")
        assert (await client.commit(task_id=None)).committed == 1
        assert (await client.status()).ready == 1
        assert await client.versions() == []
        await chat.close()
    assert [row.reward for row in rows(explorer)] == [1.0]


def test_both_clients_have_the_same_names_and_arguments():
    for sync, asynchronous in ((flywheel.Client, flywheel.AsyncClient), (Admin, AsyncAdmin)):
        for name, method in inspect.getmembers(sync, inspect.isfunction):
            if not name.startswith("_") and name != "drive":
                other = getattr(asynchronous, name)
                ours = [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]
                theirs = [(p.name, p.kind, p.default) for p in inspect.signature(other).parameters.values()]
                assert ours == theirs, name


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"msg_ids": "m", "reward": float("nan")}, "reward=nan"),
        ({"msg_ids": "m", "metrics": {"steps": float("inf")}}, "metrics"),
        ({"msg_ids": "m", "rating": "good"}, "rating='good'"),
        ({"reward": 1.0}, "no target"),
        ({"msg_ids": "m", "reward": 1.0, "idempotency_key": "a b"}, "idempotency_key"),
        ({"msg_ids": "m", "comment": object()}, "no JSON"),
    ],
)
def test_a_wrong_value_is_named_before_anything_is_sent(arguments, named):
    with flywheel.Client("http://127.0.0.1:1") as client, pytest.raises(flywheel.ConfigError, match=named):
        client.feedback(**arguments)


@pytest.mark.parametrize("key", ["secret\n", " secret", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key):
    with pytest.raises(flywheel.ConfigError, match="FLYWHEEL_KEY") as caught:
        flywheel.Client("http://127.0.0.1:8010", key=key)
    assert key.strip() not in str(caught.value)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8010", "ftp://h", "http://h:port", "http://h:99999"])
def test_an_address_that_is_none_is_refused(url, monkeypatch):
    monkeypatch.delenv("FLYWHEEL_URL", raising=False)
    with pytest.raises(flywheel.ConfigError, match="FLYWHEEL_URL"):
        flywheel.Client(url)


def test_url_key_and_the_model_s_name_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("FLYWHEEL_URL", "http://127.0.0.1:8010/v1/")
    monkeypatch.setenv("FLYWHEEL_KEY", "secret")
    with flywheel.Client() as client:
        assert client.model().name == "agent"
    monkeypatch.setenv("FLYWHEEL_MODEL", "desk")
    with flywheel.Client() as client:
        assert (client.model().name, client.model(3).name) == ("desk", "desk@3")
        assert (client.url, client.model().key) == ("http://127.0.0.1:8010", "secret")


def test_no_answer_and_an_answer_of_nobody_are_tried_again_under_the_same_key():
    keys = []

    def answer(number: int, request: Any) -> Answer | None:
        keys.append(request.headers["idempotency-key"])
        if number == 0:
            return None
        if number < 3:
            return (503, {"Retry-After": "0.01"}, b"{}") if number == 1 else (429, {}, b"{}")
        if number < 5:  # of a proxy
            return 502 if number == 3 else 504, {}, b"<html>Bad Gateway</html>"
        return 200, {}, json.dumps(RECEIPTS).encode()

    with answering(answer) as url, flywheel.Client(url) as client:
        assert client.feedback("m", reward=1).applied == 1
    assert len(keys) == 6
    assert len(set(keys)) == 1


@pytest.mark.parametrize("status", [400, 401, 403, 413, 422, 500, 501])
def test_another_refusal_is_raised_at_once(status):
    asked = []

    def answer(number: int, _request: Any) -> Answer:
        asked.append(number)
        error = {"error": {"message": "no", "type": "t", "param": "reward", "code": "c"}}
        return status, {}, json.dumps(error).encode()

    raises = pytest.raises(flywheel.Refused, match="no")
    with answering(answer) as url, flywheel.Client(url) as client, raises as caught:
        client.feedback("m", reward=1)
    assert (caught.value.status, caught.value.code, caught.value.param, len(asked)) == (status, "c", "reward", 1)


def test_what_stays_away_is_raised_when_the_retries_end():
    away = answering(lambda *_: (503, {"Retry-After": "7"}, b"{}"))
    with away as url, flywheel.Client(url, retry_s=0.5) as client, pytest.raises(flywheel.Away) as caught:
        client.commit()
    assert caught.value.retry_after_s == 7
    address = f"127.0.0.1:{free_port()}"
    with flywheel.Client(f"http://me:secret@{address}/v1", retry_s=0.3) as client:
        with pytest.raises(flywheel.Unreachable, match=rf"GET /status: no answer .*explorer at http://{address} up\?"):
            client.status()
        with pytest.raises(flywheel.Unreachable):
            client.wait_ready(timeout_s=0.1)


def test_a_page_that_is_no_answer_of_an_explorer_is_refused():
    page = answering(lambda *_: (200, {}, b"<html>hello"))
    with page as url, flywheel.Client(url) as client, pytest.raises(flywheel.Refused, match="<html>hello"):
        client.status()


def test_unknown_targets_are_an_error_unless_that_is_fine(client):
    with pytest.raises(flywheel.NothingKnown) as caught:
        client.feedback("chatcmpl-none", reward=1)
    assert caught.value.receipts == [{"msg_id": "chatcmpl-none", "state": "unknown"}]
    assert client.feedback("chatcmpl-none", reward=1, unknown_ok=True).msg_ids == []


def test_a_repeat_under_a_key_counts_once_and_another_body_is_refused(client, explorer):
    msg_id = say(client.model()).id
    first = client.feedback(msg_id, reward=1, idempotency_key="k1")
    assert client.feedback(msg_id, reward=1, idempotency_key="k1") == first
    with pytest.raises(flywheel.Refused) as caught:
        client.feedback(msg_id, reward=0, idempotency_key="k1")
    assert caught.value.status == 422
    assert len(said(explorer)) == 1


Operating = list[tuple[str, str, bytes]]


@contextmanager
def operated() -> Iterator[tuple[str, Operating]]:
    """An explorer that has the routes of operators, and what it was asked."""
    asked: Operating = []

    def answer(_number: int, request: Any) -> Answer:
        asked.append((request.command, request.path, request.body))
        return 200, {}, b'{"status": "success"}'

    with answering(answer) as url:
        yield url, asked


OPERATED = [
    ("PUT", "/traffic", b'{"weights":{"12":0.9,"13":0.1}}'),
    ("POST", "/versions/13/promote", b"{}"),
    ("POST", "/rollback", b'{"to":12}'),
    ("POST", "/rollback", b'{"to":12,"again":true}'),
]


def test_operators_share_traffic_promote_and_roll_back():
    with operated() as (url, asked), flywheel.Client(url) as client:
        assert client.admin.traffic({12: 0.9, 13: 0.1}) == {"status": "success"}
        client.admin.promote(13)
        client.admin.rollback(to=12)
        client.admin.rollback(to=12, again=True)
    assert asked == OPERATED


async def test_operators_work_in_asyncio_too():
    with operated() as (url, asked):
        async with flywheel.AsyncClient(url) as client:
            await client.admin.traffic({12: 0.9, 13: 0.1})
            await client.admin.promote(13)
            await client.admin.rollback(to=12)
            await client.admin.rollback(to=12, again=True)
    assert asked == OPERATED


def test_what_is_no_version_and_no_share_is_named_before_anything_is_sent():
    client = flywheel.Client("http://127.0.0.1:9")
    for call, named in (
        (lambda: client.admin.promote(1.5), "version=1.5"),
        (lambda: client.admin.promote("13"), "version='13'"),
        (lambda: client.admin.rollback(to=-1), "to=-1"),
        (lambda: client.admin.traffic({}), "weights={}"),
        (lambda: client.admin.traffic({12: None}), "None"),
        (lambda: client.admin.traffic({12: 0.0}), "12: 0.0"),
        (lambda: client.admin.traffic({"12": 1.0}), "'12'"),
    ):
        with pytest.raises(flywheel.ConfigError, match=re.escape(named)):
            call()


def test_what_cannot_serve_is_refused_and_the_newest_version_may_serve_again(client):
    with pytest.raises(flywheel.Refused, match="version 7 does not exist") as caught:
        client.admin.promote(7)
    assert (caught.value.status, caught.value.code) == (409, "cannot_serve")
    assert client.admin.traffic(None) == {"status": "success", "traffic": {}}


def test_a_rollback_that_the_explorer_refuses_says_why(client):
    with pytest.raises(flywheel.Refused, match="there is no version 12") as caught:
        client.admin.rollback(to=12)
    assert (caught.value.status, caught.value.code) == (409, "cannot_roll_back")
