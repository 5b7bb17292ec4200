"""kill -9 of the explorer under load, again and again: nothing it acknowledged is missing, nothing stands twice.

A short form runs in CI; FLYWHEEL_TORTURE=full kills 300 times (about ten minutes for each database).
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import httpx
import pytest

from shared.config import Config
from shared.ledger.connect import Ledger
from tests.support.books import Books
from tests.support.forms import FULL
from tests.support.processes import Process, wait_for, write_config
from tests.support.servers import free_port

pytestmark = pytest.mark.torture
KILLS = 300 if FULL else 5


@pytest.mark.timeout(3600)
def test_nothing_acknowledged_is_lost(tmp_path: Path, scripted_engine, database_url):
    config = Config.model_validate(
        {
            "root_dir": str(tmp_path / "data"),
            "database_url": database_url,
            "model": {"path": str(tmp_path)},
            "explorer": {
                "port": free_port(),
                "engines": [{"name": "e0", "url": scripted_engine.url}],
                "reload": {"poll_interval_s": 0.02},
            },
        }
    )
    file = write_config(config, tmp_path / "flywheel.yaml")
    draw = random.Random(1)
    books = Books(f"http://127.0.0.1:{config.explorer.port}")
    books.open(8)
    try:
        for kill in range(KILLS + 1):
            before = len(books.rewards)
            with Process(["explorer", "-c", str(file)], tmp_path / "explorer.log") as explorer:
                wait_for(lambda: len(books.rewards) > before + 5, "service", 240, 0.01)  # noqa: B023
                time.sleep(draw.random() * 0.5)  # a random moment is what is wanted
                if kill == KILLS:
                    books.close()
                    assert explorer.stop() == 0
    finally:
        books.close()
    assert "Traceback" not in (tmp_path / "explorer.log").read_text()
    ledger = Ledger.open(config.ledger_url)
    books.check(ledger)
    ledger.close()
    print(f"{KILLS} kills, {len(books.chats)} chats, {len(books.rewards)} rewards, {books.refused} cut off or refused")


def test_the_books_find_a_lost_row(tmp_path: Path, explorer):
    """The check itself, checked: one row and one reward taken away on purpose."""
    from sqlalchemy import delete, update

    from shared.ledger.tables import experiences, payloads

    books = Books(explorer.url)
    with httpx.Client(base_url=explorer.url, timeout=60) as http:
        for _ in range(3):
            books._visit(http, random.Random(0))
    books.check(explorer.ledger)
    with explorer.ledger.write() as connection:
        connection.execute(update(experiences).where(experiences.c.id == 1).values(reward=-1.0))
    with pytest.raises(AssertionError):
        books.check(explorer.ledger)
    with explorer.ledger.write() as connection:
        connection.execute(delete(payloads))
        connection.execute(delete(experiences).where(experiences.c.id == 2))
    with pytest.raises(AssertionError, match="missing"):
        books.check(explorer.ledger)
