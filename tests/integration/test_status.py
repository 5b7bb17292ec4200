"""`flywheel status`: engines with the reasons why they are not in service, the pace, and rows in quarantine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from explorer_service.reload.names import engine_key
from shared.config import Config, EngineAddress, ExplorerConfig, TrainerConfig
from shared.experience import Tokens
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import Followed, pace, quarantined
from shared.stop_request import StopRequest
from tests.support.experiences import record_ready, rows
from tests.support.processes import run_here
from tests.support.samples import sample
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer, wait_until
from trainer_service.claim import Claimer

URL, OTHER = "http://127.0.0.1:1", "http://10.0.0.7:8101"  # the first is the one in the configuration


def shown(config: Config, capsys: pytest.CaptureFixture[str]) -> str:
    assert run_here(config, "status") == 0
    return capsys.readouterr().out


def begin_explorer(ledger: Ledger, *engines: str) -> None:
    """An explorer's first heartbeat."""
    with ledger.write() as connection:
        transitions.heartbeat(connection, "x", dict.fromkeys(engines, Followed()))


def announce(ledger: Ledger, url: str, state: str, version: int | None) -> None:
    with ledger.write() as connection:
        assert transitions.acquire_engine(connection, url, "x")
        assert transitions.set_engine_state(connection, url, "x", state, version)


def test_an_engine_that_no_explorer_owns_is_shown_beside_the_one_that_serves(
    start_explorer: Callable[..., RunningExplorer], scripted_engine: ScriptedEngine, capsys
):
    explorer = start_explorer([scripted_engine.url, "http://127.0.0.1:9"]).wait_ready()
    said = shown(explorer.config, capsys)
    assert "engine    e0  serving  version 0  " in said
    assert "engine    e1  not in service  version none  " in said
    assert "no explorer owns it; the explorer's log states the reason" in said


@pytest.mark.parametrize("url", ["http://localhost:8109", "http://GPU-7.internal", "https://10.0.0.7"])
def test_an_engine_is_shown_by_its_name_however_its_url_is_written(url, config, ledger, capsys):
    engine = EngineAddress(name="e0", url=url)
    config = config.model_copy(update={"explorer": ExplorerConfig(engines=(engine,))})
    begin_explorer(ledger, engine_key(engine))
    announce(ledger, engine_key(engine), "serving", 3)
    assert "engine    e0  serving  version 3  " in shown(config, capsys)


def test_an_engine_that_dies_is_shown_as_one_that_does_not_answer(
    start_explorer: Callable[..., RunningExplorer], capsys, monkeypatch
):
    monkeypatch.setattr("explorer_service.reload.controller.HEALTH_INTERVAL_S", 0.1)
    engine = ScriptedEngine()
    explorer = start_explorer([engine.url]).wait_ready()
    engine.stop()
    wait_until(lambda: "engine    e0  unavailable  version none  " in shown(explorer.config, capsys))
    assert "it does not answer" in shown(explorer.config, capsys)


@pytest.mark.parametrize(
    ("state", "version", "reason"),
    [
        ("checking", None, "it answers, but no version is proven on it; the explorer's log states the reason"),
        ("degraded", 3, "it serves an older version than it should; the explorer's log states the reason"),
        ("reloading", 3, "it loads a version, and gets no chats meanwhile"),
        ("serving", 3, None),
    ],
)
def test_the_state_that_its_owner_announced_is_shown_with_what_it_means(state, version, reason, config, ledger, capsys):
    begin_explorer(ledger, f"host {URL}", OTHER)
    announce(ledger, f"host {URL}", state, version)
    announce(ledger, OTHER, "serving", 3)
    said = shown(config, capsys)
    assert f"engine    e0  {state}  version {'none' if version is None else version}  host {URL}\n" in said
    assert f"engine    {OTHER}  serving  version 3\n" in said
    assert ("          " in said.partition("engine")[2]) == (reason is not None)
    if reason is not None:
        assert f"\n          {reason}" in said


def test_engines_without_a_live_explorer_are_not_shown_as_serving(config, ledger, capsys):
    begin_explorer(ledger, URL)
    announce(ledger, URL, "serving", 3)
    with ledger.write() as connection:
        transitions.sign_off(connection, "x")
    assert "engine    none in service: no explorer is alive" in shown(config, capsys)


def test_replies_that_take_longer_than_a_minute_count_in_the_pace_when_they_are_stored(ledger):
    now = time.time()
    slow = [replace(sample(f"m{n}"), created_at=now - 90, latency_s=80.0) for n in range(6)]
    with ledger.write() as connection:
        transitions.record(connection, [*slow, replace(sample("old"), created_at=now - 90)])
        assert pace(connection, now).recorded_per_minute == 6.0


def quarantine_long_rows(ledger: Ledger, lengths: range) -> None:
    """Claim rows of these lengths, which are longer than the trainer takes, and one that it takes."""
    replies = {length: np.ones(length - 1, np.int32) for length in lengths}
    long = [
        replace(row, tokens=Tokens(np.ones(1, np.int32), reply, -np.ones(len(reply), np.float32)))
        for row, reply in zip(rows(len(lengths), name="long"), replies.values(), strict=True)
    ]
    record_ready(ledger, [*long, *rows(1)])
    config = TrainerConfig(batch_size=len(lengths) + 1, max_trajectory_tokens=4, poll_interval_s=0.02)
    assert [row.msg_id for row in Claimer(ledger, config, StopRequest()).next().rows] == ["m0"]


def test_rows_that_are_too_long_are_one_reason_whatever_their_lengths(ledger):
    quarantine_long_rows(ledger, range(5, 35))
    ((reason, count),) = ledger.fetch(quarantined).items()
    assert count == 30 and "it has more tokens than the 4 that are trained on" in reason


def test_reasons_beyond_the_most_frequent_are_counted_together(ledger):
    with ledger.write() as connection:
        for number in range(30):
            times = range(2 if number == 29 else 1)
            rare = [sample(f"m{number}-{n}", quarantine=f"reason {number:02}") for n in times]
            transitions.record(connection, rare)
    counted = ledger.fetch(quarantined)
    frequent = ["reason 29", *(f"reason {number:02}" for number in range(19))]
    assert list(counted) == [f"quarantined: {reason}" for reason in [*frequent, "other reasons"]]
    assert sum(counted.values()) == 31 and counted["quarantined: other reasons"] == 10
