"""Engines that stage versions on their own disk, under an explorer: what they load, and what becomes of failures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.engine.stage import Stage
from shared.chain import Link, copy_version
from shared.ledger import transitions
from shared.ledger.queries import list_versions
from shared.versions import Manifest, verify_version
from tests.support.deltas import FILES, Weights
from tests.support.postgres import sqlite_alone
from tests.support.servers import RunningExplorer, served, wait_until

database_url = sqlite_alone  # nothing here depends on the database


@pytest.fixture
def weights(tmp_path) -> Weights:
    return Weights(tmp_path)


@pytest.fixture
def publish(weights, explorer) -> Callable[..., None]:
    """Publish a version as a trainer does, as a delta where it may."""

    def publish(version: int, **more: Any) -> None:
        weights.publish(version, **more)
        with explorer.ledger.write() as connection:
            parent = version - 1 if version else None
            transitions.publish(connection, version=version, parent=parent, kind="full", step=version)

    return publish


@pytest.fixture
def stage(scripted_engine, tmp_path) -> Stage:
    """The engine stages from now on."""
    scripted_engine.script.stage = Stage(tmp_path, tmp_path / "own disk", keep=2)
    return scripted_engine.script.stage


def row(explorer: RunningExplorer, version: int) -> Any:
    with explorer.ledger.read() as connection:
        return next(row for row in list_versions(connection) if row.version == version)


def engine_state(explorer: RunningExplorer) -> Any:
    return explorer.http.get("/status").json()["engines"][0]


def loads(scripted_engine) -> list[str]:
    return [call.removeprefix("reload ") for call in scripted_engine.script.calls if call.startswith("reload")]


def test_deltas_are_staged_before_the_pause_and_loaded_from_the_engines_own_disk(
    explorer, scripted_engine, publish, stage
):
    for version in range(4):
        publish(version)
        wait_until(lambda version=version: served(explorer) == str(version))
    assert [name[:7] for name in loads(scripted_engine)][-3:] == ["v000001", "v000002", "v000003"]
    assert all("-" in name for name in loads(scripted_engine)[-3:]), "of folders that were staged"
    assert engine_state(explorer)["state"] == "serving"


def test_each_version_is_staged_once_and_the_one_before_it_stays(explorer, scripted_engine, publish, stage, tmp_path):
    copied = []

    def copy(chain: list[Link], *more: Any) -> Manifest:
        copied.append(chain[-1].manifest.version)
        return copy_version(chain, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.engine.stage.copy_version", copy)
        for version in range(5):
            publish(version, share=0.9)
            wait_until(lambda version=version: served(explorer) == str(version))
    assert copied == sorted(set(copied))
    assert sorted(folder.name[:7] for folder in (tmp_path / "own disk").iterdir()) == ["v000003", "v000004"]


def test_an_engine_that_stages_nothing_serves_on_when_a_delta_comes_and_takes_up_the_next_whole_version(
    explorer, scripted_engine, publish
):
    publish(0)
    publish(1, share=0.9)
    wait_until(lambda: served(explorer) == "1")
    publish(2)
    wait_until(lambda: "loads whole versions only" in str(engine_state(explorer)))
    assert served(explorer) == "1"
    assert row(explorer, 2).state == "PUBLISHED"
    publish(3, share=0.9)
    wait_until(lambda: served(explorer) == "3")
    assert loads(scripted_engine)[-1] == "v000003"
    assert engine_state(explorer)["state"] == "serving"


def test_a_version_that_does_not_become_what_was_published_is_rejected_and_reaches_no_engine(
    explorer, scripted_engine, publish, stage, weights
):
    publish(0)
    publish(1)
    wait_until(lambda: served(explorer) == "1")
    whole = weights.publish(2).whole
    file = weights.folder(2) / "MANIFEST.json"
    file.write_text(file.read_text().replace(whole[FILES[0]].sha256, "0" * 64))
    with explorer.ledger.write() as connection:
        transitions.publish(connection, version=2, parent=1, kind="full", step=2)
    wait_until(lambda: row(explorer, 2).state == "REJECTED")
    assert "does not match its sha256" in row(explorer, 2).reason
    assert served(explorer) == "1"
    assert not [name for name in loads(scripted_engine) if name.startswith("v000002")]


@pytest.mark.parametrize("stages", [True, False])
def test_files_are_hashed_once_by_the_engine_that_stages_them_or_else_by_the_explorer(
    explorer, scripted_engine, publish, weights, request, monkeypatch, stages
):
    if stages:
        request.getfixturevalue("stage")
    hashed: list[str] = []

    def verify(folder: Path, sha256: str | None = None) -> Manifest:
        hashed.append(folder.name)
        return verify_version(folder, sha256)

    monkeypatch.setattr("explorer_service.reload.take_up.verify_version", verify)
    for version in range(2):
        publish(version, share=0.9)
        wait_until(lambda version=version: served(explorer) == str(version))
    assert set(hashed) == (set() if stages else {"v000000", "v000001"}) and hashed.count("v000001") <= 1
    weights.publish(2, share=0.9)
    file = weights.folder(2) / FILES[0]
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    with explorer.ledger.write() as connection:
        transitions.publish(connection, version=2, parent=1, kind="full", step=2)
    wait_until(lambda: row(explorer, 2).state == "REJECTED")
    assert "does not match its sha256" in row(explorer, 2).reason
    assert served(explorer) == "1"
    assert "v000002" not in str(loads(scripted_engine))


def test_a_full_disk_while_staging_leaves_the_engine_serving_and_says_so(
    explorer, scripted_engine, publish, stage, monkeypatch
):
    publish(0)
    publish(1)
    wait_until(lambda: served(explorer) == "1")

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("services.engine.stage.copy_version", no_space)
        publish(2)
        wait_until(lambda: "No space left on device" in str(engine_state(explorer)))
        assert served(explorer) == "1"
        assert row(explorer, 2).state == "PUBLISHED"
    wait_until(lambda: served(explorer) == "2")
    assert engine_state(explorer)["state"] == "serving"


def test_a_load_that_fails_goes_back_to_what_is_staged_still(explorer, scripted_engine, publish, stage):
    for version in range(3):
        publish(version)
        wait_until(lambda version=version: served(explorer) == str(version))
    before = loads(scripted_engine)[-1]
    scripted_engine.script.failed_loads = _Starting("v000003")
    publish(3)
    wait_until(lambda: row(explorer, 3).state == "REJECTED")
    wait_until(lambda: served(explorer) == "2")
    assert loads(scripted_engine)[-1] == before


class _Starting(set[str]):
    """Holds every name that starts so."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def __contains__(self, name: object) -> bool:
        return str(name).startswith(self._prefix)
