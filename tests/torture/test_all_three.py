"""Explorer, trainer and database are killed, at random moments and at every named point; then all is counted.

What must hold afterwards, counted from outside: every acknowledged row is there once; every ready row was trained on
exactly once, on one line of versions; and the weights of every version are those of a trainer that nobody disturbed,
bit for bit.

A short form runs in CI; FLYWHEEL_TORTURE=full kills 500 times on each database and cuts the power 100 times.
"""

from __future__ import annotations

import random
import threading
import time
from itertools import groupby
from pathlib import Path

import pytest
from sqlalchemy import select

from shared.config import VersionsConfig
from shared.experience import Experience, Sampling, Tokens
from shared.ledger.connect import Ledger
from shared.ledger.queries import count_by_state, list_versions
from shared.ledger.tables import batches, experiences, payloads
from shared.versions import version_path
from tests.support.books import Books
from tests.support.experiences import record_ready, trainer_config
from tests.support.forms import FULL
from tests.support.processes import wait_for, write_config
from tests.torture.whole import BATCH, PARTS, Deaths, NamedPoints, Whole

pytestmark = pytest.mark.torture
KILLS = 500 if FULL else 8
CUTS = 100 if FULL else 1
DATABASES = pytest.mark.parametrize("database", ["sqlite", "postgresql"])
CARELESS = pytest.mark.parametrize("database", ["sqlite", "postgresql"] if FULL else ["sqlite"])
PAUSE_S = 0.03  # between a customer's visits: the trainer keeps up


@pytest.mark.timeout(3600)
@DATABASES
def test_killed_one_by_one_all_is_counted(tmp_path, lives, model, scripted_engine, database):
    whole = Whole(tmp_path, model, scripted_engine.url, database, lives)
    books = Books(whole.url, PAUSE_S)
    draw = random.Random(3)
    deaths = Deaths(whole, draw)
    database_at = time.monotonic() + 5
    mortal = {*PARTS, "database"} if whole.postgres else {*PARTS}
    try:
        books.open(4)
        while whole.kills.total() < KILLS or not mortal <= whole.kills.keys():
            deaths.look()
            if whole.postgres and time.monotonic() > database_at:
                whole.kill_database()
                database_at = time.monotonic() + draw.uniform(1, 5)
            threading.Event().wait(0.02)
        finish_and_count(tmp_path, whole, books, model)
        if FULL:
            check_points(deaths.points)
    finally:
        books.close()
        whole.close()


@pytest.mark.timeout(3600)
@DATABASES
def test_the_power_goes_and_all_is_counted(tmp_path, model, scripted_engine, database):
    whole = Whole(tmp_path, model, scripted_engine.url, database, cuts=True)
    books = Books(whole.url, PAUSE_S)
    try:
        cut_power(whole, books, CUTS)
        finish_and_count(tmp_path, whole, books, model)
    finally:
        books.close()
        whole.close()


@pytest.mark.timeout(600)
@CARELESS
def test_a_commit_without_fsync_is_found_out(tmp_path, model, scripted_engine, database):
    """The check itself, checked: the database answers before the disk has it, and the books must miss something."""
    whole = Whole(tmp_path, model, scripted_engine.url, database, cuts=True, careless=True)
    books = Books(whole.url, PAUSE_S)
    try:
        cut_power(whole, books, 2)
        books.close()
        ledger = Ledger.open(whole.config.ledger_url)
        with pytest.raises(AssertionError, match="acknowledged chats are missing"):
            books.check(ledger)
        ledger.close()
    finally:
        books.close()
        whole.close()


def cut_power(whole: Whole, books: Books, cuts: int) -> None:
    """Blackouts under load, at random moments and when a part is at a named point."""
    draw = random.Random(4)
    points = {part: NamedPoints(whole.points_file(part), draw) for part in PARTS}
    books.open(4)
    for _ in range(cuts):
        before = len(books.rewards)
        doomed = draw.choice(PARTS)
        for part in PARTS:
            whole.begin(part, points[part].next() if part == doomed else "")
        wait_for(lambda: len(books.rewards) > before + 5 or _one_died(whole), "service", 240, 0.01)  # noqa: B023
        until = time.monotonic() + draw.uniform(0, 1.5)
        while time.monotonic() < until and not _one_died(whole):
            threading.Event().wait(0.005)
        whole.black_out()


def _one_died(whole: Whole) -> bool:
    return not all(life.alive for life in whole.lives.values())


def finish_and_count(folder: Path, whole: Whole, books: Books, model: Path) -> None:
    """Let everything that waits be trained on, then count it."""
    before = len(books.rewards)
    whole.finish(batch_timeout_s=0.5)
    try:
        wait_for(lambda: len(books.rewards) > before + 20, "service after the last kill", 240)
    except AssertionError as error:
        raise AssertionError(f"{error}: {whole.log('explorer')[-2000:]}") from error
    books.close()
    whole.commit()
    ledger = Ledger.open(whole.config.ledger_url)

    def all_trained() -> bool:
        with ledger.read() as connection:
            counts = count_by_state(connection)
        return counts.get("READY", 0) == counts.get("LEASED", 0) == 0

    try:
        wait_for(all_trained, "training on all that was ready", 300)
        assert [whole.lives[part].stop() for part in PARTS] == [0, 0]
        for part in PARTS:
            assert "Traceback" not in whole.log(part)
        books.check(ledger)
        versions = count_training(ledger)
    finally:
        ledger.close()
    check_weights(folder, whole, model, versions)
    rows = sum(len(lived) for lived in versions)
    shown = ", ".join(f"{count} {name}" for name, count in whole.kills.items())
    print(f"kills: {shown}; {len(books.chats)} chats, {len(versions)} versions of {rows} rows, {books.refused} refused")


def count_training(ledger: Ledger) -> list[list[Experience]]:
    """The rows in each version, from version 1 on. Every rewarded row is in exactly one."""
    with ledger.read() as connection:
        versions = list_versions(connection)
        query = (
            select(experiences, payloads.c.tokens, batches.c.consumed_version.label("of_batch"))
            .join(payloads, payloads.c.experience_id == experiences.c.id)
            .outerjoin(batches, batches.c.id == experiences.c.batch_id)
            .order_by(experiences.c.consumed_version, experiences.c.id)
        )
        rows = connection.execute(query).all()
    line = sorted(version.version for version in versions)
    assert line == list(range(len(line)))
    assert {v.version: v.parent for v in versions} == {n: n - 1 if n else None for n in line}, "one line"
    assert not [v for v in versions if v.state == "REJECTED"]
    committed = [row for row in rows if row.state != "RECORDED"]
    assert {row.state for row in committed} == {"CONSUMED"}
    assert all(row.consumed_version == row.of_batch for row in committed), "lineage answers both ways alike"
    assert all(row.state == "CONSUMED" for row in rows if row.reward is not None), "a rewarded row was left out"
    trained = [[_experience(row) for row in own] for _, own in groupby(committed, key=lambda row: row.consumed_version)]
    assert len(trained) == len(line) - 1
    return trained


def _experience(row) -> Experience:  # type: ignore[no-untyped-def]
    return Experience(
        id=row.id,
        msg_id=row.msg_id,
        choice=row.choice,
        parent_id=None,
        task_id=None,
        run_id=None,
        conversation_id=row.msg_id,
        version=row.version,
        reward=row.reward,
        created_at=row.created_at,
        tokens=Tokens.decode(row.tokens),
        sampling=Sampling(row.temperature, row.top_p, row.top_k, row.min_p),
    )


def check_weights(folder: Path, whole: Whole, model: Path, versions: list[list[Experience]]) -> None:
    """The same batches, trained on by a trainer that nobody disturbs, give the same bits."""
    root = folder / "undisturbed"
    root.mkdir()
    bounds = {"logprob_gap": None, "change_of_update": None}
    config = trainer_config(root, model, batch_size=BATCH, batch_timeout_s=0.5, breaker=bounds)
    config = config.model_copy(update={"versions": VersionsConfig(max_versions=10_000)})
    file = write_config(config, root / "flywheel.yaml")
    ledger = Ledger.open(config.ledger_url)
    life = whole.lives["undisturbed"] = whole.forks.begin(["trainer", "-c", str(file)], root / "trainer.log")
    for version, rows in enumerate(versions, 1):  # one at a time: a batch that died often was claimed smaller
        record_ready(ledger, rows)
        wait_for(lambda: _newest(ledger) == version or not life.alive, "training undisturbed", 240, 0.01)  # noqa: B023
    assert life.stop() == 0
    ledger.close()
    for version in range(len(versions) + 1):
        one, other = ((r / version_path(version) / "model.safetensors").read_bytes() for r in (root, whole.config.root))
        assert one == other, f"the weights of version {version} differ"


def _newest(ledger: Ledger) -> int:
    with ledger.read() as connection:
        return max((row.version for row in list_versions(connection) if row.may_serve), default=-1)


def check_points(points: dict[str, NamedPoints]) -> None:
    """Each part has died at every point that it comes by in each of its rounds."""
    for part, own in points.items():
        known, died = own.read()
        print(f"{part}: died at {len(died)} named points, {died.total()} times; never at {sorted(known - died.keys())}")
        # at an orderly stop, at a heartbeat of a long life, and beside another explorer
        seldom = ("dismiss_trainer", "extend_lease", "sign_off", "open_stream", "close_stream")
        assert not [point for point in known - died.keys() if not point.startswith(seldom)]
