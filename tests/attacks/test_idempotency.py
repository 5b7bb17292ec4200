"""Idempotency keys: a request that is repeated, or sent several times at once, is applied once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from sqlalchemy import func, select

from shared.errors import LedgerError
from shared.ledger import transitions
from shared.ledger.tables import experiences, idempotency, signals
from tests.support.samples import record


def test_an_idempotency_key_with_another_body_is_refused_and_changes_nothing(explorer):
    known = explorer.chat().json()["id"]
    headers = {"Idempotency-Key": "k"}
    first = explorer.http.post("/feedback", json={"msg_ids": [known], "reward": 1}, headers=headers)
    again = explorer.http.post("/feedback", json={"msg_ids": [known], "reward": 1}, headers=headers)
    other = explorer.http.post("/feedback", json={"msg_ids": [known], "reward": 0}, headers=headers)
    assert first.status_code == 200
    assert again.content == first.content
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    with explorer.ledger.read() as connection:
        assert connection.execute(select(experiences.c.reward)).scalar() == 1


def test_one_request_that_is_sent_several_times_at_once_is_applied_once(explorer):
    names = record(explorer.ledger, 400)
    body = {"msg_ids": names, "rating": "up"}

    def send(_number: int) -> httpx.Response:
        return explorer.http.post("/feedback", json=body, headers={"Idempotency-Key": "k"}, timeout=60)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(send, range(4)))
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.content for answer in answers} <= {send(0).content}
    with explorer.ledger.read() as connection:
        assert connection.execute(select(func.count()).select_from(signals)).scalar() == 400


def test_of_two_large_requests_with_one_key_at_once_one_is_applied_and_the_other_refused(explorer):
    names = record(explorer.ledger, 400)

    def send(reward: int) -> httpx.Response:
        body = {"msg_ids": names, "reward": reward}
        return explorer.http.post("/feedback", json=body, headers={"Idempotency-Key": "k"}, timeout=60)

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(send, range(2)))
    assert sorted(answer.status_code for answer in answers) == [200, 422]
    won = [answer.status_code for answer in answers].index(200)
    assert {receipt["state"] for receipt in answers[won].json()["receipts"]} == {"applied"}
    assert send(won).content == answers[won].content
    with explorer.ledger.read() as connection:
        assert connection.execute(select(signals.c.value)).scalars().all() == [won] * 400


def test_a_large_request_that_failed_after_some_rows_is_applied_to_the_rest_when_it_is_repeated(explorer, monkeypatch):
    names, apply = record(explorer.ledger, 400), transitions.apply_to
    left = iter(range(3))

    def fails_once(*given: Any) -> Any:
        if next(left, None) == 2:
            raise LedgerError("away")
        return apply(*given)

    monkeypatch.setattr(transitions, "apply_to", fails_once)
    body, key = {"msg_ids": names, "reward": 1}, {"Idempotency-Key": "k"}
    first, again, once_more = (explorer.http.post("/feedback", json=body, headers=key, timeout=60) for _ in range(3))
    assert (first.status_code, again.status_code) == (503, 200)
    assert {receipt["state"] for receipt in again.json()["receipts"]} == {"duplicate", "applied"}
    assert once_more.content == again.content
    other = explorer.http.post("/feedback", json={**body, "reward": 0}, headers=key, timeout=60)
    assert other.status_code == 422
    with explorer.ledger.read() as connection:
        assert connection.execute(select(signals.c.value)).scalars().all() == [1] * 400


def test_callers_without_a_key_do_not_share_idempotency_keys_between_addresses(explorer):
    known = explorer.chat().json()["id"]
    answers = []
    for address, reward in (("127.0.0.1", 1), ("127.0.0.2", 0)):
        transport = httpx.HTTPTransport(local_address=address)
        with httpx.Client(base_url=explorer.url, transport=transport, timeout=60) as http:
            body = {"msg_ids": [known], "reward": reward}
            answers.append(http.post("/feedback", json=body, headers={"Idempotency-Key": "k"}).json())
    assert [answer["receipts"][0]["state"] for answer in answers] == ["applied", "updated"]


def test_a_remembered_answer_takes_little_room_and_is_whole(explorer):
    body = {"msg_ids": [f"{number:05}" + "x" * 200 for number in range(5_000)], "reward": 1}
    first, again = (
        explorer.http.post("/feedback", json=body, headers={"Idempotency-Key": "k"}, timeout=60) for _ in range(2)
    )
    assert first.status_code == 404
    assert (again.status_code, again.content) == (404, first.content)
    with explorer.ledger.read() as connection:
        (stored,) = connection.execute(select(idempotency.c.response)).scalars()
    assert len(stored) < 6_000
