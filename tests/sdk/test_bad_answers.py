"""Servers that answer with what cannot be read, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import flywheel
import pytest

from tests.sdk.test_client import answering
from tests.support.servers import wait_until

UNREADABLE = (200, {"Content-Encoding": "gzip"}, b"this is not gzip")


@contextmanager
def silent() -> Iterator[tuple[str, threading.Event]]:
    """A server that accepts requests and answers none; the event is set at the first one."""
    asked, over = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        asked.set()
        over.wait(300)

    with answering(wait) as url:
        yield url, asked
        over.set()


async def test_a_response_that_cannot_be_read_is_no_response():
    with answering(lambda *_: UNREADABLE) as url:
        with flywheel.Client(url, retry_s=0.1) as client, pytest.raises(flywheel.Unreachable, match="DecodingError"):
            client.status()
        async with flywheel.AsyncClient(url, retry_s=0.1) as other:
            with pytest.raises(flywheel.Unreachable, match="DecodingError"):
                await other.status()


@pytest.mark.timeout(60)
async def test_the_wait_for_an_explorer_that_accepts_requests_and_answers_none_ends_in_time():
    with silent() as (url, _):
        with flywheel.Client(url, timeout_s=300) as client, pytest.raises(flywheel.Unreachable):
            client.wait_ready(timeout_s=0.1)
        async with flywheel.AsyncClient(url, timeout_s=300) as other:
            with pytest.raises(flywheel.Unreachable):
                await other.wait_ready(timeout_s=0.1)


@pytest.mark.parametrize("answer", [UNREADABLE, (200, {}, b'{"committed": []}')])
def test_periodic_commits_go_on_after_an_answer_that_cannot_be_read(answer):
    def commit(number: int, _: Any) -> Any:
        return answer if number == 0 else (200, {}, b'{"committed": 0, "ready": 0}')

    with answering(commit) as url:
        runner = flywheel.TrainingRunner(url, lambda *_: None, lambda *_: None, commit_every_s=0.01)
        with runner:
            wait_until(lambda: runner.stats.commits > 1)


def test_a_commit_during_which_the_runner_is_stopped_ends_without_an_error(monkeypatch):
    monkeypatch.setattr("flywheel.shadow.LAST_S", 0.2)
    failures: list[BaseException] = []

    def commit() -> None:
        try:
            runner.commit()
        except BaseException as exc:  # noqa: BLE001 — for the assertion
            failures.append(exc)

    with silent() as (url, asked):
        runner = flywheel.TrainingRunner(url, lambda *_: None, lambda *_: None)
        runner.start()
        committing = threading.Thread(target=commit)
        committing.start()
        assert asked.wait(60)
        runner.stop(0.0)
        committing.join(60)
    assert not committing.is_alive()
    assert failures == []
