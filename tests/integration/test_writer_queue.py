"""Writers of a SQLite ledger wait in a queue that keeps none of them out, and nobody waits long in it."""

from __future__ import annotations

import fcntl
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from shared.ledger import writer_queue
from shared.ledger.connect import Ledger

WRITES = 60


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/ledger.sqlite3"


def test_of_writers_that_never_pause_none_is_kept_out(url):
    done = [0, 0, 0]
    seen: list[list[int]] = []
    barrier = threading.Barrier(len(done))

    ledgers = [Ledger.open(url) for _ in done]

    def write(writer: int) -> None:
        ledger = ledgers[writer]
        barrier.wait()
        for _ in range(WRITES):
            with ledger.write():
                time.sleep(0.005)
            done[writer] += 1
        seen.append(list(done))
        ledger.close()

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(len(done))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert min(seen[0]) > WRITES / 3, "when the first one has ended"


def test_a_new_ledger_that_another_process_begins_at_the_same_moment_is_waited_for(url, tmp_path):
    other = sqlite3.connect(tmp_path / "ledger.sqlite3", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(Ledger.open, url)
        wait([opening], timeout=0.2)
        assert not opening.done()
        other.execute("COMMIT")
        opening.result(60).close()
    other.close()


def write_once(url: str) -> None:
    ledger = Ledger.open(url)
    with ledger.write() as connection:
        connection.exec_driver_sql("UPDATE trainers SET step = 0")
    ledger.close()


def test_the_first_of_the_queue_may_be_suspended(url, tmp_path):
    write_once(url)
    with (tmp_path / "ledger.sqlite3-queue").open("r+") as queue:
        fcntl.flock(queue, fcntl.LOCK_EX)
        write_once(url)


def test_without_a_queue_writers_write(url, tmp_path, monkeypatch):
    monkeypatch.setattr(writer_queue, "_PATIENCE_S", 600.0)
    (tmp_path / "ledger.sqlite3-queue").mkdir()
    write_once(url)
