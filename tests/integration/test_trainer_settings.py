"""A trainer says in what the explorers of its ledger are configured otherwise."""

from __future__ import annotations

import logging

import pytest

from services.trainer import resumed
from shared.config import Config, TrainerConfig, agreed_settings
from shared.errors import StartupError
from shared.ledger import transitions
from shared.stop_request import StopRequest
from tests.support.batches import ALONE
from tests.support.servers import wait_until, write_scripted_version
from trainer_service import agreement
from trainer_service.agreement import Agreement
from trainer_service.loop import Trainer


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


@pytest.mark.parametrize("rows", [None, []])
def test_only_a_trainer_that_learns_from_the_ledger_is_compared(rows, ledger, config, tmp_path, caplog):
    write_scripted_version(tmp_path, 0, -1.0)
    with ledger.write() as connection:
        another = {"kind": "full", "step": 0, "manifest_sha256": "0" * 64}  # with which no trainer starts
        transitions.publish(connection, version=0, parent=None, **another)
        transitions.heartbeat(connection, "explorer", {}, agreed_settings(settings()))
    own = config.model_copy(update={"trainer": TrainerConfig(batch_size=288)})
    with (
        caplog.at_level(logging.ERROR, "flywheel.trainer"),
        pytest.raises(StartupError, match="holds another v000000"),
        resumed(own, ALONE, StopRequest(), Trainer, rows),
    ):
        pass
    assert ("trainer.batch_size" in caplog.text) == (rows is None)
