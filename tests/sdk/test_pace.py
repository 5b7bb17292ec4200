"""The pace of learn: what is ready and what runs in flight will add, against the bound."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from flywheel.errors import Away, NotTraining
from flywheel.pace import Pacer
from flywheel.results import Committed, Status


class Talker:
    """A client whose explorer has so many READY rows."""

    explorer = SimpleNamespace(shown_url="http://h", retry_s=30.0)

    def __init__(self, ready: int, batch_size: int | None = None) -> None:
        self.ready, self.batch_size = ready, batch_size
        self.is_alive = True
        self.engines: list[str] = []
        self.tripped: dict[str, str] | None = None

    async def status(self) -> Status:
        trainers = [{"alive": self.is_alive, "tripped": self.tripped}]
        rows, engines = {"READY": self.ready}, [{"state": state} for state in self.engines]
        return Status({"rows": rows, "trainers": trainers, "batch_size": self.batch_size, "engines": engines})


async def starts(pacer: Pacer, runs: int = 1, within_s: float = 0.05) -> bool:
    """Whether a group of so many runs may start now."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().call_later(within_s, stopping.set)
    await pacer.wait(stopping, runs)
    return not stopping.is_set()


class Held(Pacer):
    """A pacer whose explorer is at hand."""

    def __init__(
        self, ready: int, bound: int | None, engine_patience_s: float = 600.0, collects: bool = False, **options: Any
    ) -> None:
        self.explorer = Talker(ready, **options)
        super().__init__(self.explorer, bound, not collects, engine_patience_s=engine_patience_s)  # type: ignore[arg-type]


def pacer(ready: int, bound: int | None = 8, **options: Any) -> Held:
    return Held(ready, bound, **options)


async def test_an_end_during_a_status_that_takes_long_is_no_missing_engine():
    held, stopping = pacer(0, engine_patience_s=0.0), asyncio.Event()

    async def status() -> Status:
        stopping.set()
        await asyncio.Event().wait()
        raise AssertionError

    held.explorer.status = status  # type: ignore[method-assign]
    await held.until_served(stopping)


@pytest.mark.parametrize(("ready", "may"), [(0, True), (8, True), (9, False)])
async def test_nothing_starts_while_more_rows_are_ready_than_the_bound(ready, may):
    assert await starts(pacer(ready)) is may


@pytest.mark.parametrize(
    ("states", "may"),
    [
        (["unavailable"], False),
        (["checking", "unavailable"], False),
        (["reloading"], True),
        (["checking", "serving"], True),
    ],
)
async def test_nothing_starts_while_no_engine_answers_chats(states, may):
    held = pacer(0)
    held.explorer.engines = states
    assert await starts(held) is may


async def test_an_engine_that_stays_away_ends_the_work():
    held = pacer(0, engine_patience_s=0.0)
    held.explorer.engines = ["unavailable"]
    with pytest.raises(Away, match="no engine of http://h has been in service for 0 s"):
        await held.wait(asyncio.Event())


def ended(held: Held, runs: int, rows: int, ready: int, became_ready: int | None = None) -> None:
    """A group started, ended and was committed."""
    for _ in range(runs):
        held.starts()
    held.explorer.ready = ready
    held.committed(runs, rows, Committed(rows if became_ready is None else became_ready, ready))


@pytest.mark.parametrize("fault", [{"is_alive": False}, {"tripped": {"reason": "kl=2"}}])
async def test_rows_are_collected_beyond_the_bound_if_no_trainer_is_required_and_none_trains(fault):
    for collects in (True, False):
        held = pacer(9, collects=collects)
        vars(held.explorer).update(fault)
        assert await starts(held) is collects


async def test_open_runs_count_by_what_the_committed_ones_made():
    held = pacer(0)
    await held.look(asyncio.Event())
    ended(held, 2, 8, ready=8)
    held.starts()
    assert not await starts(held), "8 ready, as the commit said, and 4 to come"
    held = pacer(4)
    ended(held, 1, 4, ready=4)
    assert await starts(held), "4 ready, and nothing is open"
    held.starts()
    assert await starts(held), "4 ready and 4 to come"
    held.starts()
    assert not await starts(held)


async def test_a_reply_s_choices_count_each_as_the_commit_says():
    held = pacer(0)
    ended(held, 1, 1, ready=0, became_ready=8)
    held.starts()
    assert await starts(held), "8 to come"
    held.starts()
    assert not await starts(held)


async def test_the_first_runs_are_few_while_nobody_knows_how_many_rows_they_make():
    held = pacer(0, bound=32)
    begun = 0
    while begun < 32 and await starts(held):
        held.starts()
        begun += 1
    assert begun == 5


async def test_a_group_that_ended_counts_until_it_is_committed():
    held = pacer(0)
    ended(held, 1, 4, ready=0)
    for _ in range(3):
        held.starts()
    assert not await starts(held)
    held.committed(3, 12, Committed(12, 0))
    assert await starts(held)


async def test_a_group_of_more_rows_than_the_bound_is_started_when_nothing_else_is_open():
    held = pacer(8)
    ended(held, 1, 100, ready=8)
    assert await starts(held)


async def test_a_group_starts_when_all_of_it_has_room_or_the_trainer_would_wait():
    held = pacer(0, bound=32, batch_size=16)
    ended(held, 8, 32, ready=0)
    assert await starts(held, runs=8)
    held.starts()
    for _ in range(3):
        held.starts()
    assert await starts(held, runs=8), "what is to come is a batch, and then the trainer would wait"
    held.starts()
    assert not await starts(held, runs=8), "20 rows are to come, and the group would make 52 of it"
    assert await starts(held, runs=4)


async def test_a_commit_lets_the_next_one_start_at_once():
    held = pacer(0, bound=4)
    ended(held, 1, 4, ready=0)
    for _ in range(2):
        held.starts()
    asyncio.get_running_loop().call_later(0.01, held.committed, 2, 8, Committed(8, 0))
    assert await starts(held, within_s=10)


async def test_broken_runs_leave_no_mark():
    held = pacer(0, bound=8)
    ended(held, 1, 4, ready=0)
    for _ in range(20):
        ended(held, 1, 0, ready=0)
    held.starts()
    held.starts()
    assert await starts(held), "twice 4 to come"


@pytest.mark.parametrize(("bound", "warnings"), [(15, 1), (16, 0), (None, 0)])
async def test_a_bound_below_the_trainer_s_batch_is_warned_of_once(caplog, bound, warnings):
    held = pacer(0, bound=bound, batch_size=16)
    for _ in range(2):
        await held.look(asyncio.Event(), 0.0)
    assert len(caplog.messages) == warnings
    assert all("max_ready_rows=15" in message and "at least 16" in message for message in caplog.messages)


@pytest.mark.parametrize(("batch_size", "bound"), [(16, 32), (None, 1024)])
async def test_the_bound_is_two_batches_of_the_trainer(batch_size, bound):
    held = pacer(0, bound=None, batch_size=batch_size)
    await held.look(asyncio.Event())
    assert held.bound == bound


async def test_a_trainer_that_comes_back_in_time_is_waited_for_however_long_nobody_looked(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("flywheel.pace.time.monotonic", lambda: now[0])
    held = pacer(0)
    await held.look(asyncio.Event())
    held.explorer.is_alive = False
    for moment in (1000.0, 1059.0):
        now[0] = moment
        await held.look(asyncio.Event())
    now[0] = 1061.0
    with pytest.raises(NotTraining, match="for 60 s"):
        await held.look(asyncio.Event())
    held.explorer.is_alive = True
    now[0] += 2.0
    found = await held.look(asyncio.Event())
    assert found is not None and found.is_training


async def test_the_version_is_known_also_where_no_trainer_has_been_alive_for_too_long():
    held = Held(0, 8)
    held.explorer.is_alive, held._patience_s = False, 0.0
    assert await held.version(asyncio.Event(), 0.0) is None  # the status of this explorer names none
    with pytest.raises(NotTraining):
        await held.wait(asyncio.Event())
