"""A trainer says in what the explorers of its ledger are configured otherwise."""

from __future__ import annotations

import logging

import pytest

from shared.config import Config, agreed_settings
from shared.ledger import transitions
from tests.support.servers import wait_until
from trainer_service import agreement
from trainer_service.agreement import Agreement


def settings(**trainer: object) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "trainer": trainer})


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    monkeypatch.setattr(agreement, "INTERVAL_S", 0.02)


def test_a_trainer_logs_once_in_what_explorers_are_configured_otherwise(ledger, caplog):
    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]

    def live(explorer: str, **trainer: object) -> None:
        with ledger.write() as connection:
            transitions.heartbeat(connection, explorer, {}, agreed_settings(settings(**trainer)))

    live("old-worker-1")
    live("old-worker-2")
    live("same", batch_size=288)
    with caplog.at_level(logging.ERROR, "flywheel.trainer"), Agreement(ledger, settings(batch_size=288)):
        wait_until(lambda: len(lines()) == 1)
        assert "trainer.batch_size is 288 here and 64 there" in lines()[0] and "same file" in lines()[0]
        assert "old-worker-1, old-worker-2" in lines()[0]
        live("new", batch_size=288, algorithm="sft")
        wait_until(lambda: len(lines()) == 2)
        assert "new" in lines()[1] and "trainer.learns_from is ['metric', 'rating', 'reward'] here" in lines()[1]
    assert len(lines()) == 2


def test_a_trainer_says_so_at_its_start_even_if_it_ends_at_once(ledger, caplog):
    with ledger.write() as connection:
        transitions.heartbeat(connection, "explorer", {}, agreed_settings(settings()))
    with caplog.at_level(logging.ERROR, "flywheel.trainer"), Agreement(ledger, settings(batch_size=288)):
        pass
    assert "trainer.batch_size" in caplog.text


def test_a_trainer_of_a_file_is_not_compared(ledger, caplog):
    with ledger.write() as connection:
        transitions.heartbeat(connection, "explorer", {}, agreed_settings(settings()))
    with Agreement(ledger, None):
        pass
    assert "trainer.batch_size" not in caplog.text
