"""Where an event loop runs already, as in a notebook: the sync forms name the async ones, which do the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flywheel
import pytest

from tests.sdk.conftest import TASKS, count, rows

NOWHERE: dict[str, Any] = {"url": "http://127.0.0.1:9"}
judge = flywheel.LLMJudge(flywheel.Model.of("http://127.0.0.1:9/v1", "strong", key="k"), "Is it good?")


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (lambda: flywheel.learn(count, TASKS, **NOWHERE), "await flywheel.alearn"),
        (lambda: flywheel.evaluate(count, TASKS, **NOWHERE), "await flywheel.aevaluate"),
        (lambda: flywheel.compare(count, TASKS, 0, 1, **NOWHERE), "await flywheel.acompare"),
        (lambda: judge.judge("6 * 7?", "42"), "await judge.ajudge"),
    ],
)
async def test_a_sync_form_names_the_async_one(call: Callable[[], object], instead: str) -> None:
    with pytest.raises(flywheel.ConfigError, match=instead):
        call()


async def test_two_versions_are_compared_where_a_loop_runs(explorer):
    found = await flywheel.acompare(count, iter(TASKS), 0, 0, url=explorer.url)
    assert (found.difference, found.a.n, found.b.n, rows(explorer)) == (0.0, len(TASKS), len(TASKS), [])


def test_an_error_of_a_call_in_a_loop_of_its_own_is_raised_as_it_is(monkeypatch):
    async def fails(*_: Any) -> Any:
        raise RuntimeError("no luck")

    monkeypatch.setattr(judge, "ajudge", fails)
    with pytest.raises(RuntimeError, match="no luck"):
        judge.judge("6 * 7?", "42")
