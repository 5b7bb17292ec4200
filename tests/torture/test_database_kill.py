"""kill -9 of PostgreSQL, all its processes, under load, again and again: what was acknowledged stands when it is back.

A short form runs in CI; FLYWHEEL_TORTURE=full kills 100 times. (SQLite has no process of its own: see the explorer's.)
"""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from shared.config import Config
from shared.ledger.connect import Ledger
from tests.support.books import Books
from tests.support.forms import FULL
from tests.support.postgres import Postgres
from tests.support.processes import Process, wait_for, write_config
from tests.support.servers import free_port

pytestmark = pytest.mark.torture
KILLS = 100 if FULL else 2


@pytest.mark.timeout(3600)
def test_nothing_acknowledged_is_lost_with_the_database(tmp_path: Path, scripted_engine):
    server = Postgres(durable=True)
    config = Config.model_validate(
        {
            "root_dir": str(tmp_path / "data"),
            "database_url": server.new_database(),
            "model": {"path": str(tmp_path)},
            "explorer": {"port": free_port(), "engines": [{"name": "e0", "url": scripted_engine.url}]},
        }
    )
    file = write_config(config, tmp_path / "flywheel.yaml")
    draw = random.Random(2)
    books = Books(f"http://127.0.0.1:{config.explorer.port}")
    books.open(8)
    try:
        with Process(["explorer", "-c", str(file)], tmp_path / "explorer.log") as explorer:
            for _ in range(KILLS):
                before = len(books.rewards)
                wait_for(lambda: len(books.rewards) > before + 20, "service", 240, 0.01)  # noqa: B023
                threading.Event().wait(draw.random() * 0.5)  # a random moment is what is wanted
                server.kill()
                server.start()
            before = len(books.rewards)
            wait_for(lambda: len(books.rewards) > before + 20, "service after the last kill", 240)
            books.close()
            assert explorer.stop() == 0
        assert "Traceback" not in (tmp_path / "explorer.log").read_text()
        ledger = Ledger.open(config.ledger_url)
        books.check(ledger)
        ledger.close()
    finally:
        books.close()
        server.stop()
    print(f"{KILLS} kills, {len(books.chats)} chats, {len(books.rewards)} rewards, {books.refused} cut off or refused")
