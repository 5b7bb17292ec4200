"""Faults around a take-up on scripted engines, for explorers in threads or processes. Each function checks one."""

from __future__ import annotations

import shutil
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from services.engine import stage as staging
from services.engine.stage import Stage
from shared.versions import version_path
from tests.support.folder_faults import FOLDER_FAULTS, LATE, WEIGHTS, publish_copy
from tests.support.house import House, Streams
from tests.support.servers import wait_until

CALLS = ("/pause", "/collective_rpc", "/resume", "/v1/completions")  # the last one requests the proof


def give_up_folders(house: House, good: int) -> None:
    """Each fault of a folder is found before an engine loads it."""
    with Streams(house) as chats:
        for fault in FOLDER_FAULTS:
            version = publish_copy(house.root, house.ledger, good, fault)
            wait_until(lambda: house.state(version) == "REJECTED", 120)  # noqa: B023 — called at once
            assert fault.reason in (house.row(version).reason or ""), fault.name
            assert not house.loads(version), fault.name
    house.all_serve(good)
    assert len(chats.whole) == 8 and not chats.ended
    chats.check_labels()


def take_up(house: House, good: int, is_good: bool) -> None:
    """A version is taken up with streams in flight, or the last good one is loaded again."""
    version = house.newest + 1
    for engine in house.engines:
        engine.script.wrong_probe_for = set() if is_good else {f"v{version:06d}"}
    with Streams(house) as chats:
        house.publish(version)
        wait_until(lambda: house.state(version) == ("SERVING" if is_good else "REJECTED"), 120)
        house.all_serve(version if is_good else good)
    chats.check_labels()
    assert not is_good or (len(chats.whole) == 8 and not chats.ended)


def wait_for_folder(house: House, good: int, elsewhere: Path) -> None:
    """The explorers wait for a folder that appears late, while the engines serve; then it is taken up."""
    with Streams(house) as chats:
        version = publish_copy(house.root, house.ledger, good, LATE, late=elsewhere)
    assert house.state(version) == "PUBLISHED" and not house.loads(version)
    house.all_serve(good)
    with Streams(house) as crossing:
        shutil.move(elsewhere, house.root / version_path(version))
        house.all_serve(version)
    assert house.state(version) == "SERVING"
    for seen in (chats, crossing):
        assert len(seen.whole) == 8 and not seen.ended


def fill_staging_disk(house: House, good: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines' own disks are full: they serve on, report it, and take the version up when there is space."""
    for number, engine in enumerate(house.engines):
        engine.script.stage = Stage(house.root, house.root / "staged" / str(number), keep=2)
    empty = staging._empty

    def full(folder: Path) -> Path:
        (empty(folder) / WEIGHTS).symlink_to("/dev/full")
        return folder

    with monkeypatch.context() as patch, Streams(house) as chats:
        patch.setattr(staging, "_empty", full)
        house.publish(version := house.newest + 1)
        wait_until(lambda: any(_says(house, "No space left on device") for _ in range(house.asked)))
        wait_until(lambda: all(house.serves(one, good, "degraded") for one in house.explorers))
        assert house.state(version) == "PUBLISHED" and not house.loads(version)
    assert len(chats.whole) == 8 and not chats.ended
    house.all_serve(version)
    chats.check_labels()
    for engine in house.engines:
        engine.script.stage = None


def _says(house: House, reason: str) -> bool:
    """Whether an explorer reports this: the engine's owner does, the others name the owner."""
    return any(reason in str(explorer.http.get("/status").json()["engines"]) for explorer in house.explorers)


def kill_engine(house: House, path: str) -> None:
    """An engine that is killed by a request of this path restarts, and takes the version up."""
    deaths = house.engines[0].script.deaths
    house.engines[0].script.deadly.add(path)
    with Streams(house) as chats:
        house.publish(version := house.newest + 1)
        wait_until(lambda: house.engines[0].script.deaths == deaths + 1)
    house.all_serve(version)
    assert house.state(version) == "SERVING"
    chats.check_labels()


def lock_ledger(house: House, path: str, seconds: float) -> None:
    """The ledger is locked for a while, beginning when an engine gets a request of this path.

    The version is taken up, and every stream is whole except those whose row the ledger did not store in time.
    """
    locked: list[float] = []

    def lock() -> None:
        if locked:
            return  # the other engine also calls this
        locked.append(time.monotonic())
        connection: Any = sqlite3.connect(house.root / "ledger.sqlite3", isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA busy_timeout = 5000")
        connection.execute("BEGIN IMMEDIATE")

        def unlock() -> None:
            connection.rollback()
            connection.close()

        threading.Timer(seconds, unlock).start()

    for engine in house.engines:
        engine.script.on_call[path] = lock
    with Streams(house) as chats:
        house.publish(version := house.newest + 1)
        wait_until(lambda: bool(locked))
    house.all_serve(version)
    assert house.state(version) == "SERVING"
    assert len(chats.whole) + len(chats.ended) == 8 and set(chats.ended.values()) <= {"ledger_unavailable"}
    wait_until(lambda: _are_recorded(house, chats))
    chats.check_labels()
    for engine in house.engines:
        del engine.script.on_call[path]


def _are_recorded(house: House, chats: Streams) -> bool:
    return set(chats.whole) <= house.recorded()
