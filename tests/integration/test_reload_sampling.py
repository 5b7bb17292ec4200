"""An engine gets no chats, and a version is not rejected, while this machine cannot read how it is sampled."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from explorer_service.reload import follow
from shared.errors import VersionMissing
from shared.experience import Sampling
from shared.ledger import transitions
from tests.support.postgres import sqlite_alone
from tests.support.reloads import SETTINGS, shown, states
from tests.support.servers import publish, served, wait_until, write_scripted_version

pytestmark = pytest.mark.usefixtures("patient_health")
database_url = sqlite_alone  # nothing here depends on the database


@pytest.mark.usefixtures("lasting_leases")
def test_a_follower_gives_an_engine_no_chats_before_it_knows_how_the_version_is_sampled(
    scripted_engine, start_explorer, monkeypatch
):
    both = [start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready() for _ in range(2)]
    publish(both[0], 0)
    wait_until(lambda: all(served(explorer) == "0" and states(explorer)[0] == "SERVING" for explorer in both))
    owner, other = sorted(both, key=lambda explorer: not shown(explorer)["owned"])
    read, late = follow.read_sampling_defaults, [True]

    def read_or_not(folder):
        if late and folder.name == "v000001":
            raise VersionMissing(f"{folder} is not there")
        return read(folder)

    monkeypatch.setattr(follow, "read_sampling_defaults", read_or_not)
    config = b'{"temperature": 0.25}'
    write_scripted_version(owner.config.root, 1, -2.0, files={"generation_config.json": config})
    with owner.ledger.write() as connection:
        transitions.publish(connection, version=1, parent=0, kind="full", step=1)
    wait_until(lambda: served(owner) == "1")
    wait_until(lambda: shown(other)["state"] == "checking" and "is not there" in str(shown(other)["reason"]))
    late.clear()
    wait_until(lambda: served(other) == "1")
    assert other.deps.pool.engines[0].sampling_defaults.temperature == 0.25


def test_the_sampling_of_a_version_without_a_folder_is_not_known(tmp_path):
    folder = write_scripted_version(tmp_path, 0, -1.0)
    assert follow.read_sampling_defaults(folder) == Sampling()
    with pytest.raises(VersionMissing, match="v000009 is not there"):
        follow.read_sampling_defaults(tmp_path / "versions/v000009")


def test_settings_that_cannot_be_read_here_reject_no_version(scripted_engine, start_explorer, monkeypatch):
    """As where the folder's server has started anew: its files have stale handles for a while."""
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready()
    publish(explorer, 0)
    config = {"generation_config.json": b'{"temperature": 0.25}'}
    write_scripted_version(explorer.config.root, 1, -2.0, files=config)
    with explorer.ledger.write() as connection:
        transitions.publish(connection, version=1, parent=0, kind="full", step=1)
    wait_until(lambda: states(explorer).get(1) == "SERVING")
    explorer.stop()
    read_bytes, asked = Path.read_bytes, []

    def read_or_not(file: Path) -> bytes:
        if file.name in config:
            asked.append(file)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read_bytes(file)

    monkeypatch.setattr(Path, "read_bytes", read_or_not)
    again = start_explorer([scripted_engine.url], reload=SETTINGS)
    wait_until(lambda: len(asked) > 3)
    assert states(again)[1] == "SERVING"
    monkeypatch.undo()
    wait_until(lambda: shown(again)["state"] == "serving" and shown(again)["version"] == 1)
    assert again.deps.pool.engines[0].sampling_defaults.temperature == 0.25


@pytest.mark.usefixtures("lasting_leases")
def test_before_a_version_is_published_the_defaults_are_those_of_the_model(scripted_engine, start_explorer, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base/generation_config.json").write_text('{"temperature": 0.25}')
    for explorer in [start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready() for _ in range(2)]:
        assert explorer.deps.pool.engines[0].sampling_defaults.temperature == 0.25
