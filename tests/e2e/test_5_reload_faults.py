"""Faults of a published folder, each found before the real engine is asked to load it, with streams in flight."""

from __future__ import annotations

import shutil
import time
from typing import Any

import pytest

from shared.ledger.queries import list_versions
from shared.versions import version_path
from tests.e2e.conftest import Live
from tests.e2e.test_5_reload import Streams, label, serving
from tests.support.folder_faults import FOLDER_FAULTS, LATE, FolderFault, publish_copy
from tests.support.processes import wait_for

pytestmark = pytest.mark.engine
AT_ONCE = 3  # faults while the same streams are in flight
LATE_S = 5.0


def publish(live: Live, ledger: Any, fault: FolderFault) -> int:
    """A version with the weights of the one that serves, and this fault."""
    return publish_copy(live.config.root, ledger, serving(live), fault)


def test_a_fault_of_a_folder_reaches_neither_the_engine_nor_a_stream(live, ledger):
    live.learn(8)
    good, held = serving(live), label(live)
    for first in range(0, len(FOLDER_FAULTS), AT_ONCE):
        with Streams(live) as chats:
            for fault in FOLDER_FAULTS[first : first + AT_ONCE]:
                version = publish(live, ledger, fault)
                row = wait_for(lambda version=version: _judged(ledger, version), f"a verdict of {fault.name}", 240)
                assert row.state == "REJECTED" and fault.reason in row.reason, (fault.name, row.reason)
                assert serving(live) == good and label(live) == held, fault.name
        assert set(chats.ends.values()) == {"data: [DONE]"}
    assert live.http.get("/ready").status_code == 200
    assert live.learn(8) > version, "and training goes on"


def test_a_folder_that_shows_late_is_waited_for_and_then_taken_up(live, ledger, tmp_path):
    good = live.learn(8)
    with Streams(live) as chats:
        version = publish_copy(live.config.root, ledger, good, LATE, late=tmp_path / "late")
    assert set(chats.ends.values()) == {"data: [DONE]"} and serving(live) == good
    wait_for(lambda: _age_s(ledger, version) > LATE_S, "the network", 30)
    assert _judged(ledger, version) is None and serving(live) == good
    with Streams(live) as chats:
        shutil.move(tmp_path / "late", live.config.root / version_path(version))
        wait_for(lambda: serving(live) == version, "the version in service", 240)
    assert set(chats.ends.values()) == {"data: [DONE]"}
    assert label(live).startswith(f"{version}:") and _judged(ledger, version).state == "SERVING"


def _age_s(ledger: Any, version: int) -> float:
    return time.time() - _row(ledger, version).created_at


def _judged(ledger: Any, version: int) -> Any:
    row = _row(ledger, version)
    return row if row.state not in ("RESERVED", "PUBLISHED") else None


def _row(ledger: Any, version: int) -> Any:
    with ledger.read() as connection:
        return next(row for row in list_versions(connection) if row.version == version)
