"""A long series of writes leaves others their turn: SQLite gives its lock to whoever asks at the right moment."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, update

from services import samples
from services.commands import archive, import_
from shared.experience import State
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.tables import experiences, payloads, signals
from shared.reward import SCORES, Signal
from tests.support.experiences import record_ready, rows, samples_of
from tests.support.processes import run_here

ROWS = 12


class Competitor:
    """Another process, which begins to write during the first of a command's transactions."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._begun = threading.Event()
        self._is_done = False
        self.was_done: list[bool] = []  # at the begin of each transaction
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def _write(self) -> None:
        self._begun.wait()
        with self._ledger.write():
            self._is_done = True

    def beside(self, part: Callable[..., Any]) -> Callable[..., Any]:
        """The work of one transaction. The first takes so long that SQLite looks for its end only every 0.1 s."""

        def work(connection: Connection, *args: Any, **options: Any) -> Any:
            self.was_done.append(self._is_done)
            self._begun.set()
            time.sleep(0.02 if self.was_done[1:] else 0.4)
            return part(connection, *args, **options)

        return work

    def end(self) -> None:
        self._begun.set()
        self._thread.join()
        self._ledger.close()


@pytest.fixture
def competitor(config, ledger) -> Iterator[Competitor]:
    made = Competitor(Ledger.open(config.ledger_url))
    yield made
    made.end()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("arguments", "module", "part"),
    [
        (["rewards"], transitions, "recompute_rewards"),
        (["erase", "--key", "k"], transitions, "erase"),
        (["archive", "--to", "FILE", "--older-than-days", "0"], transitions, "remove"),
        (["import", "FILE"], samples, "store"),
        (["import", "FILE", "--commit"], transitions, "commit_part"),
    ],
)
def test_a_command_of_many_transactions_leaves_others_their_turn(
    arguments, module, part, config, ledger, competitor, monkeypatch
):
    record_ready(ledger, rows(ROWS))
    with ledger.write() as connection:
        connection.execute(update(experiences).values(key_name="k"))
    file = str(config.root / "rows.jsonl")
    if arguments[0] == "import":
        run_here(config, "export", "--tokens", "--out", file)
        with ledger.write() as connection:
            for table in (signals, payloads, experiences):
                connection.execute(table.delete())
    elif arguments[0] == "archive":
        with ledger.write() as connection:
            connection.execute(update(experiences).values(state=State.DISCARDED))
    monkeypatch.setattr(transitions, "commit_part", partial(transitions.commit_part, at_most=1))
    monkeypatch.setattr(module, part, competitor.beside(getattr(module, part)))
    monkeypatch.setattr(sys.modules["shared.ledger.transitions.feedback"], "MAX_PARAMETERS", 1)
    monkeypatch.setattr(sys.modules["shared.ledger.transitions.erase"], "MAX_PARAMETERS", 1)
    monkeypatch.setattr(archive, "AT_ONCE", 1)
    monkeypatch.setattr(import_, "TRANSACTION_ROWS", 1 if part == "store" else 500)
    assert run_here(config, *(file if one == "FILE" else one for one in arguments)) == 0
    assert len(competitor.was_done) >= ROWS
    assert competitor.was_done[-1]


def test_another_explorers_chats_have_their_turn_between_the_parts_of_a_commit(
    scripted_engine, start_explorer, monkeypatch
):
    explorer, other = (start_explorer([scripted_engine.url], ledger_timeout_s=1.0).wait_ready() for _ in range(2))
    ids = [explorer.chat().json()["id"] for _ in range(5)]
    explorer.http.post("/feedback", json={"msg_ids": ids, "reward": 1.0})
    commit_part, begun = transitions.commit_part, threading.Event()

    def slowly(connection: Connection, **scope: Any) -> Any:
        begun.set()
        time.sleep(0.3)
        return commit_part(connection, **scope, at_most=1)

    monkeypatch.setattr(transitions, "commit_part", slowly)
    with ThreadPoolExecutor(1) as thread:
        committed = thread.submit(explorer.http.post, "/commit", timeout=60.0)
        begun.wait()
        while not committed.done():
            assert other.chat().status_code == 200
    assert committed.result().json()["committed"] == len(ids)


@pytest.mark.parametrize(
    ("arguments", "part"), [(["rewards"], "recompute_rewards"), (["erase", "--key", "k"], "erase")]
)
def test_a_command_ends_though_rows_go_on_arriving(arguments, part, config, ledger, monkeypatch):
    record_ready(ledger, rows(ROWS))
    done: list[int] = []
    write = getattr(transitions, part)

    def beside_others(connection: Connection, *args: Any, **options: Any) -> Any:
        connection.execute(update(experiences).values(key_name="k"))
        done.append(len(done))
        assert len(done) < 9, "it goes after each new row"
        result = write(connection, *args, **options)
        arrived = samples_of(rows(1, name=f"new{len(done)}-"))
        transitions.record(connection, arrived)
        said = {"signals": [Signal("reward", value=1.0)], "rule": config.reward, "learned": SCORES}
        transitions.apply_feedback(connection, msg_ids=[arrived[0].msg_id], task_id=None, run_id=None, **said)
        return result

    monkeypatch.setattr(transitions, part, beside_others)
    assert run_here(config, *arguments) == 0
    assert len(done) == 1
