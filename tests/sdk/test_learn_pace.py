"""The pace of learn over the real explorer, whose rows nobody trains on."""

from __future__ import annotations

import signal
from typing import Any

import flywheel

from tests.sdk.conftest import announce_trainer, rows, say_async

BOUND, POLLS = 8, 20
TASKS = [{"n": n} for n in range(200)]


class Watching(flywheel.AsyncClient):
    """It notes how many rows are READY whenever learn asks, and presses Ctrl-C once more than the bound stay so many.

    Without a pace, learn asks at most once for each start: so their number grows from one time to the next.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.ready: list[int] = []

    async def status(self) -> Any:
        found = await super().status()
        self.ready.append(found.ready)
        if found.ready > BOUND and self.ready[-POLLS:] == [found.ready] * POLLS:
            self.ready.clear()  # pressed again, it would end learn at once
            signal.raise_signal(signal.SIGINT)
        return found


async def answer(task: Any, model: flywheel.Model) -> float:
    await say_async(model)
    return 1.0


async def test_learn_starts_nothing_however_long_more_rows_are_ready_than_the_bound(explorer, tmp_path):
    announce_trainer(explorer)
    pace = {"at_once": 4, "max_ready_rows": BOUND, "progress": False}
    async with Watching(explorer.url) as client:
        report = await flywheel.alearn(answer, TASKS, client=client, folder=tmp_path / "learn", **pace)
    assert (report.stopped, report.runs) == ("interrupted", len(rows(explorer)))
    assert report.runs < len(TASKS) / 2, "the bound or a batch of 64, and what was in flight"
