"""Versions whose folders are not there, for a while or for good."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest

from explorer_service.reload.judge import VersionJudge
from shared.ledger import transitions
from shared.ledger.queries import VersionRow
from tests.support.forms import one_database
from tests.support.reloads import SETTINGS, states
from tests.support.servers import publish, served, wait_until, write_scripted_version

pytestmark = [pytest.mark.usefixtures("patient_health"), one_database]


@pytest.fixture
def missed(monkeypatch) -> dict[int, str]:
    """Versions that were looked for and not found, with the last reason."""
    found: dict[int, str] = {}
    note = VersionJudge._note

    def noted(self: VersionJudge, row: VersionRow, reason: str) -> None:
        found[row.version] = reason
        note(self, row, reason)

    monkeypatch.setattr(VersionJudge, "_note", noted)
    return found


def test_a_version_that_shows_late_is_waited_for_while_the_engine_serves(explorer, missed, tmp_path):
    publish(explorer, 0)
    wait_until(lambda: served(explorer) == "0")
    folder = write_scripted_version(tmp_path, 1, -1.5)
    weights = folder / "model.safetensors"
    shutil.move(weights, tmp_path / "weights")
    shutil.move(folder, tmp_path / "late")
    with explorer.ledger.write() as connection:
        transitions.publish(connection, version=1, parent=0, kind="full", step=1)
    wait_until(lambda: 1 in missed)
    assert served(explorer) == "0"
    shutil.move(tmp_path / "late", folder)
    assert served(explorer) == "0"
    shutil.move(tmp_path / "weights", weights)
    wait_until(lambda: served(explorer) == "1")
    assert states(explorer)[1] == "SERVING"


def test_an_engine_that_starts_while_the_newest_version_is_not_there_serves_the_one_before(
    scripted_engine, start_explorer, explorer, tmp_path
):
    publish(explorer, 0)
    publish(explorer, 1, -1.5)
    wait_until(lambda: served(explorer) == "1")
    with explorer.ledger.write() as connection:
        transitions.publish(connection, version=2, parent=1, kind="full", step=2)
    explorer.stop()
    again = start_explorer([scripted_engine.url]).wait_ready()
    assert served(again) == "1"
    write_scripted_version(tmp_path, 2, -2.5)
    wait_until(lambda: served(again) == "2")


def test_a_version_that_does_not_show_is_rejected_in_the_end_and_the_next_one_serves(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS | {"appear_s": 0.2}).wait_ready()
    publish(explorer, 0)
    wait_until(lambda: served(explorer) == "0")
    with explorer.ledger.write() as connection:
        transitions.publish(connection, version=1, parent=0, kind="full", step=1)
    wait_until(lambda: states(explorer)[1] == "REJECTED")
    assert served(explorer) == "0"
    publish(explorer, 2, -2.5)
    wait_until(lambda: served(explorer) == "2")


def test_no_version_is_rejected_because_version_0_is_not_there(scripted_engine, start_explorer, missed, tmp_path):
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS | {"appear_s": 0.0}).wait_ready()
    publish(explorer, 0)
    publish(explorer, 1, -1.5)
    wait_until(lambda: served(explorer) == "1")
    shutil.move(tmp_path / "versions" / "v000000", tmp_path / "elsewhere")
    publish(explorer, 2, -2.5)
    wait_until(lambda: 2 in missed)
    assert served(explorer) == "1"
    shutil.move(tmp_path / "elsewhere", tmp_path / "versions" / "v000000")
    wait_until(lambda: served(explorer) == "2")


def test_the_time_in_which_version_0_is_not_there_is_not_counted_as_that_of_a_version_without_a_folder(
    scripted_engine, start_explorer, missed, tmp_path, monkeypatch
):
    clock = [0.0]
    monkeypatch.setattr("explorer_service.reload.judge.time", SimpleNamespace(monotonic=lambda: clock[0]))
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS | {"appear_s": 60.0}).wait_ready()
    publish(explorer, 0)
    publish(explorer, 1, -1.5)
    wait_until(lambda: served(explorer) == "1")
    shutil.move(tmp_path / "versions" / "v000000", tmp_path / "elsewhere")
    with explorer.ledger.write() as connection:
        transitions.publish(connection, version=2, parent=1, kind="full", step=2)
    wait_until(lambda: "version 0" in missed.get(2, ""))
    clock[0] += 60.0
    shutil.move(tmp_path / "elsewhere", tmp_path / "versions" / "v000000")
    wait_until(lambda: "version 0" not in missed[2])
    write_scripted_version(tmp_path, 2, -2.5)
    wait_until(lambda: served(explorer) == "2")
