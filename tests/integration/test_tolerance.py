"""How far an engine may be from the trainer: by type, by what it showed on version 0, or as configured."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from shared.ledger.queries import list_versions
from shared.ledger.tables import calibrations
from tests.support.postgres import sqlite_alone
from tests.support.servers import publish, served, wait_until, write_scripted_version

NOISE = 0.004  # twice what float32 allows of one logprob
RELOAD = {"poll_interval_s": 0.02, "retry_s": 0.05}


database_url = sqlite_alone  # nothing here depends on the database


def version_state(explorer, version: int) -> str:
    with explorer.ledger.read() as connection:
        return next(row.state for row in list_versions(connection) if row.version == version)


def test_an_engine_that_was_started_on_version_0_shows_its_own_noise_and_is_held_to_it(
    scripted_engine, start_explorer, tmp_path, caplog
):
    scripted_engine.script.noise = NOISE
    scripted_engine.start_on(write_scripted_version(tmp_path, 0, -1.0))
    explorer = start_explorer(["http://127.0.0.1:1"], reload=RELOAD)  # makes the ledger
    publish(explorer, 0)
    explorer.stop()
    scripted_engine.start_on(tmp_path / "versions" / "v000000")
    explorer = start_explorer([scripted_engine.url], reload=RELOAD).wait_ready()
    assert "reload v000000" not in scripted_engine.script.calls
    with explorer.ledger.read() as connection:
        row = connection.execute(select(calibrations)).one()
    assert (row.dtype, row.largest, row.mean) == ("float32", pytest.approx(NOISE), pytest.approx(NOISE))
    assert "0.004 nats on average, more than rounding of float32 explains" in caplog.text
    publish(explorer, 1, -1.5)
    wait_until(lambda: served(explorer) == "1")
    scripted_engine.script.noise = 4 * NOISE
    publish(explorer, 2, -2.5)
    wait_until(lambda: not explorer.deps.pool.serving)  # not even the last good one passes
    scripted_engine.script.noise = NOISE
    wait_until(lambda: served(explorer) in ("1", "2"))


@pytest.mark.parametrize("tolerance", [None, {"per_token": 0.05, "mean": 0.02}])
def test_an_engine_of_somebody_else_is_held_to_the_table_or_to_what_is_configured(
    scripted_engine, start_explorer, tolerance
):
    scripted_engine.script.noise, scripted_engine.script.keeps_labels = NOISE, False
    explorer = start_explorer([scripted_engine.url], reload=RELOAD | {"tolerance": tolerance}).wait_ready()
    publish(explorer, 0)
    wait_until(lambda: scripted_engine.script.calls.count("reload v000000") >= (1 if tolerance else 2))
    if tolerance:
        wait_until(lambda: version_state(explorer, 0) == "SERVING")
    else:
        assert not explorer.deps.pool.serving
        assert version_state(explorer, 0) == "PUBLISHED", "an engine's noise condemns no base model"


def test_of_a_trainer_in_bf16_an_engine_in_float32_may_be_as_far_as_bf16_rounds(scripted_engine, start_explorer):
    scripted_engine.script.keeps_labels = False
    explorer = start_explorer([scripted_engine.url], reload=RELOAD).wait_ready()
    publish(explorer, 0)
    wait_until(lambda: served(explorer) == "0")
    scripted_engine.script.noise = 2 * NOISE
    publish(explorer, 1, -1.5, arithmetic="bfloat16")
    wait_until(lambda: served(explorer) == "1")
    publish(explorer, 2, -2.5)
    wait_until(lambda: version_state(explorer, 2) == "REJECTED")
