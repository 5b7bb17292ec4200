"""Explorer, engine and trainer are killed while versions are published, taken up and deleted, at every named point.

Watched from outside all the while: what serves, is tagged, is leased or is a trainer's line keeps its files. Afterwards
the survivors have finished or undone everything: what the ledger has given up is gone, what it has not is whole, and
each row names the versions that sampled it.

A short form runs in CI, on PostgreSQL; FLYWHEEL_TORTURE=full kills 200 times on each database, and on until the
trainer died at each point of a deletion.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
from sqlalchemy import select

from services.engine.stage import Stage
from shared.experience import MAY_SERVE, Tokens, VersionState
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import VersionRow, list_states, list_trainers, list_versions
from shared.ledger.tables import engines, experiences, payloads, version_leases
from shared.versions import verify_version
from tests.support.books import Books
from tests.support.forms import FULL
from tests.support.processes import wait_for
from tests.support.scripted_engine import ScriptedEngine
from tests.support.take_up_faults import CALLS
from tests.torture.whole import PARTS, Deaths, Whole

pytestmark = pytest.mark.torture
KILLS = 200 if FULL else 5
DATABASES = ["sqlite", "postgresql"] if FULL else ["postgresql"]
AT_WORK = "at work"  # the trainer's log says it once it has started
MOST = 3  # versions that keep their files
TOLD_STEP = 1e-3
DEAD_S = 2.5  # longer than an explorer goes without asking for an engine's health
DELETION = ("before Janitor", "after Janitor", "before janitor", "after janitor")
STATEMENTS = {f"give_up_files {number}" for number in range(1, 7)}  # of one version; with more of them there are more


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("database", DATABASES)
def test_whoever_dies_nothing_that_is_needed_is_deleted(tmp_path, lives, model, scripted_engine, database):
    whole = Whole(tmp_path, model, scripted_engine.url, database, lives, max_versions=MOST)
    books = Books(whole.url, 0.03)
    draw = random.Random(5)
    deaths = Deaths(whole, draw)
    ledger = Ledger.open(whole.config.ledger_url)
    watch = Watch(ledger, whole.config.root)
    script = scripted_engine.script
    script.tells_weights, script.told_step, script.dead_s = True, TOLD_STEP, DEAD_S
    script.gap_s, script.reload_s = 0.03, 0.1  # so that streams cross reloads
    script.stage = Stage(whole.config.root, tmp_path / "staged", keep=2)
    try:
        books.open(4)
        while whole.kills.total() < KILLS or not watch.deleted or (FULL and not died_everywhere(deaths)):
            deaths.look()
            if watch.has_served():  # before that, an engine that dies twice ends all: no other version may serve
                script.healthy = draw.random() > 0.02  # it falls silent, too, and comes back
                kill_engine(scripted_engine, draw)
            watch.look()
            threading.Event().wait(0.02)
        script.healthy = True
        script.deadly.clear()
        whole.kills["engine"] = script.deaths
        finish(whole, books, ledger, watch)
    finally:
        books.close()
        whole.close()
        ledger.close()


def kill_engine(engine: ScriptedEngine, draw: random.Random) -> None:
    """Now and then, at once or when it is asked something in a take-up."""
    script = engine.script
    if script.dead or script.deadly or draw.random() > 0.01:
        return
    if path := draw.choice(["", "/flywheel/stage", *CALLS]):
        script.deadly.add(path)
    else:
        engine.die()


def died_everywhere(deaths: Deaths) -> bool:
    """Whether the trainer died at every point of a deletion."""
    known, died = deaths.points["trainer"].read()
    of_deletion = {point for point in known if point.startswith(DELETION)}
    return bool(of_deletion) and of_deletion | STATEMENTS <= died.keys()


class Watch:
    """Looks from outside at what the ledger says and what is on the disk."""

    def __init__(self, ledger: Ledger, root: Path) -> None:
        self._ledger, self._root = ledger, root
        self.deleted: set[int] = set()
        self._tagged = False

    def look(self) -> None:
        for row in self._missing():
            assert row.version in {one.version for one in self._given_up()}, f"the files of {row} are gone"
        self.deleted |= {row.version for row in self._given_up()}
        if not self._tagged:
            with self._ledger.write() as connection:
                self._tagged = transitions.tag_version(connection, 1, "first")

    def has_served(self) -> bool:
        with self._ledger.read() as connection:
            return any(row.served_at is not None for row in list_versions(connection))

    def _missing(self) -> list[VersionRow]:
        """Versions that had files when the ledger was read, and have none afterwards."""
        with self._ledger.read() as connection:
            rows = [row for row in list_versions(connection) if row.has_files]
        return [row for row in rows if not (self._root / row.path).is_dir()]

    def _given_up(self) -> list[VersionRow]:
        """The versions that were given up; none of them may be needed."""
        with self._ledger.read() as connection:
            rows = [row for row in list_versions(connection) if row.deleted_at is not None]
            needed = {trainer.version for trainer in list_trainers(connection)}
            needed |= set(connection.execute(select(engines.c.version).where(engines.c.owner.is_not(None))).scalars())
            needed |= set(connection.execute(select(version_leases.c.version)).scalars())
        for row in rows:
            assert row.state not in (VersionState.SERVING, VersionState.RESERVED, VersionState.PUBLISHED), row
            assert row.version not in needed and row.version != 0 and row.tag is None, row
        return rows


def finish(whole: Whole, books: Books, ledger: Ledger, watch: Watch) -> None:
    """Both live on unharmed, until another version has come into service; then all is counted."""
    before = newest_served(ledger)
    whole.finish(batch_timeout_s=0.5)
    wait_for(lambda: newest_served(ledger) > before + 1, "versions after the last kill", 240)
    books.close()
    whole.commit()
    assert [whole.lives[part].stop() for part in reversed(PARTS)] == [0, 0]
    starts = whole.log("trainer").count(AT_WORK)
    whole.begin("trainer")  # at its start it deletes what no explorer needs any more
    wait_for(lambda: whole.log("trainer").count(AT_WORK) > starts, "the trainer's start", 240)
    assert whole.lives["trainer"].stop() == 0
    for part in PARTS:
        assert "Traceback" not in whole.log(part)
    watch.look()
    books.check(ledger)
    check_labels(ledger)
    with ledger.read() as connection:
        rows, states = list_versions(connection), list_states(connection, "trainer")
    there = {row.version for row in rows if row.has_files}
    assert {0, 1} < there and len(there) <= MOST + 3, f"beyond the bound: {rows}"  # tagged, served, the trainer's line
    if len(there) > MOST:
        assert there <= needed(ledger, rows), f"kept for nobody: {rows}"
    for row in rows:
        if row.has_files:
            verify_version(whole.config.root / row.path, row.manifest_sha256)
    folders = {path.name for path in (whole.config.root / "versions").iterdir() if path.is_dir()}
    unfinished = {Path(row.path).name for row in rows if row.state == VersionState.RESERVED}
    assert folders - unfinished == {Path(row.path).name for row in rows if row.has_files}
    kept = {Path(state.path).name for state in states}
    assert {path.name for path in (whole.config.root / "trainer/trainer").iterdir() if path.is_dir()} == kept
    shown = ", ".join(f"{count} {name}" for name, count in whole.kills.items())
    print(f"kills: {shown}; {len(rows)} versions, {len(watch.deleted)} deleted, {len(states)} states kept")


def needed(ledger: Ledger, rows: list[VersionRow]) -> set[int]:
    """The versions that have to keep their files where no explorer runs."""
    with ledger.read() as connection:
        trained = {trainer.version for trainer in list_trainers(connection)}
    newest = {max((row.version for row in rows if row.state == state), default=0) for state in MAY_SERVE}
    return {0} | trained | newest | {row.version for row in rows if row.tag is not None}


def check_labels(ledger: Ledger) -> None:
    """Each row's last token is its last version's; its first one is its first version's, or its reply came whole."""
    with ledger.read() as connection:
        query = select(experiences.c.version, experiences.c.version_end, payloads.c.tokens).join(payloads)
        rows = connection.execute(query).all()
    for row in rows:
        logprobs = Tokens.decode(row.tokens).logprobs
        first, last = (round(float(-logprobs[place] / TOLD_STEP)) for place in (0, -1))
        assert last == row.version_end and first in (row.version, row.version_end), (first, last, row[:2])
    print(f"{len(rows)} rows, {sum(row.version != row.version_end for row in rows)} of them crossed a reload")


def newest_served(ledger: Ledger) -> int:
    with ledger.read() as connection:
        return max((row.version for row in list_versions(connection) if row.served_at is not None), default=-1)
