"""A root_dir that belongs to another ledger, though both have versions of the same numbers: the folder is wrong."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

import pytest

from services.engine.stage import MISSING, Stage, answer
from services.trainer import resumed
from shared.belonging import require_belonging
from shared.errors import StartupError
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.stop_request import StopRequest
from shared.versions import manifest_sha256
from tests.support.batches import ALONE
from tests.support.postgres import sqlite_alone
from tests.support.processes import run_flywheel, write_config
from tests.support.reloads import SETTINGS, reject, shown, states
from tests.support.servers import (
    RunningExplorer,
    free_port,
    make_config,
    served,
    wait_until,
    write_scripted_version,
)
from trainer_service.loop import Trainer

database_url = sqlite_alone  # nothing here depends on the database


def publish(ledger: Ledger, root: Path, version: int) -> None:
    """As a trainer does: the ledger keeps the manifest's sha256."""
    digest = manifest_sha256(write_scripted_version(root, version, -1.0 - version))
    parent = version - 1 if version else None
    with ledger.write() as connection:
        about = {"kind": "full", "step": version, "manifest_sha256": digest}
        transitions.publish(connection, version=version, parent=parent, **about)


def publish_and_serve(ledger: Ledger, root: Path, *versions: int) -> None:
    for version in versions:
        publish(ledger, root, version)
        with ledger.write() as connection:
            assert transitions.serve_version(connection, version, by="engine e0")


def exchange(root: Path, version: int) -> Path:
    """Put another ledger's version in the place of this one. Returns where this one is now."""
    folder, kept = root / f"versions/v{version:06d}", root / f"kept-{version}"
    shutil.move(folder, kept)
    write_scripted_version(root, version, -1.0 - version)
    return kept


def put_back(root: Path, version: int) -> None:
    folder = root / f"versions/v{version:06d}"
    shutil.rmtree(folder)
    shutil.move(root / f"kept-{version}", folder)


def test_a_start_is_refused_and_names_both_sides_when_version_0_is_another_ledger_s(tmp_path):
    config = make_config(tmp_path / "root", [f"http://127.0.0.1:{free_port()}"], port=free_port())
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger:
        for version in (0, 1):
            publish(ledger, config.root, version)
        require_belonging(config.root, ledger)
        exchange(config.root, 0)
    ended = run_flywheel("explorer", "-c", str(write_config(config, tmp_path / "f.yaml")), timeout_s=240)
    assert ended.returncode == 1, ended.stderr[-1500:]
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("flywheel: ")]
    assert "v000000" in line and str(config.root / "versions") in line and "ledger.sqlite3" in line
    assert "set root_dir" in line and "database_url" in line


def test_a_copy_of_the_folder_that_went_on_with_another_ledger_is_refused(tmp_path):
    config = make_config(tmp_path, ["http://e0"])
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger:
        publish_and_serve(ledger, tmp_path, 0, 1)
        exchange(tmp_path, 1)
        with pytest.raises(StartupError, match="v000001"):
            require_belonging(tmp_path, ledger)


def test_a_damaged_version_that_has_never_served_or_was_given_up_refuses_no_start(tmp_path):
    config = make_config(tmp_path, ["http://e0"])
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger:
        for version in (0, 1, 2):
            publish(ledger, tmp_path, version)
        with ledger.write() as connection:
            assert transitions.serve_version(connection, 1, by="engine e0")
            assert transitions.reject_version(connection, 1, "damaged", by="engine e0")
        for version in (1, 2):
            exchange(tmp_path, version)
        require_belonging(tmp_path, ledger)


def test_a_damaged_version_among_others_that_have_served_refuses_no_start(tmp_path):
    config = make_config(tmp_path, ["http://e0"])
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger:
        publish_and_serve(ledger, tmp_path, 0, 1, 2)
        exchange(tmp_path, 1)
        require_belonging(tmp_path, ledger)
        exchange(tmp_path, 2)
        with pytest.raises(StartupError, match="v000001"):
            require_belonging(tmp_path, ledger)


def test_a_trainer_without_a_state_does_not_begin_with_another_ledger_s_version(tmp_path, monkeypatch):
    config = make_config(tmp_path, ["http://e0"])
    monkeypatch.setattr("services.trainer.build_update", None)  # nothing is built
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger:
        publish_and_serve(ledger, tmp_path, 0, 1, 2)
    exchange(tmp_path, 2)
    refusal = "version 2 cannot be trained from: .* is not the one that was published .*restore its folder"
    with pytest.raises(StartupError, match=refusal), resumed(config, ALONE, StopRequest(), Trainer):
        pass


def test_a_trainer_on_a_folder_that_went_on_with_another_ledger_deletes_nothing_there(tmp_path, monkeypatch):
    config = make_config(tmp_path, ["http://e0"])
    monkeypatch.setattr("services.trainer.build_update", None)
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger:
        publish_and_serve(ledger, tmp_path, 0, 1)
        with ledger.write() as connection:
            assert transitions.reserve_version(connection, writer=config.trainer.name) == 2
    exchange(tmp_path, 1)
    folder = write_scripted_version(tmp_path, 2, -3.0)
    with pytest.raises(StartupError, match="v000001 holds another"), resumed(config, ALONE, StopRequest(), Trainer):
        pass
    assert folder.is_dir()


def begin(explorer: RunningExplorer, *versions: int) -> None:
    for version in versions:
        publish(explorer.ledger, explorer.config.root, version)
        wait_until(lambda: states(explorer).get(version) == "SERVING")  # noqa: B023


def test_version_0_of_another_ledger_is_not_taken_up_and_not_rejected(tmp_path, scripted_engine, start_explorer):
    config = make_config(tmp_path, [scripted_engine.url])
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger:
        publish(ledger, tmp_path, 0)
    exchange(tmp_path, 0)
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS)
    wait_until(lambda: "is not the one that was published" in str(shown(explorer)["reason"]))
    assert "root_dir" in str(shown(explorer)["reason"]) and shown(explorer)["state"] == "checking"
    time.sleep(0.3)  # long enough to reject it
    assert states(explorer) == {0: "PUBLISHED"}
    put_back(tmp_path, 0)
    wait_until(lambda: shown(explorer)["state"] == "serving" and states(explorer) == {0: "SERVING"})


def test_while_version_0_is_another_ledger_s_a_newer_version_is_not_rejected(tmp_path, scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS | {"appear_s": 0.2}).wait_ready()
    begin(explorer, 0, 1)
    exchange(tmp_path, 0)
    publish(explorer.ledger, tmp_path, 2)
    wait_until(lambda: shown(explorer)["state"] == "degraded")
    assert "is not the one that was published" in str(shown(explorer)["reason"])
    time.sleep(0.5)  # longer than a version is looked for
    assert served(explorer) == "1" and states(explorer) == {0: "RETIRED", 1: "SERVING", 2: "PUBLISHED"}
    put_back(tmp_path, 0)
    wait_until(lambda: served(explorer) == "2")


def test_a_version_that_served_is_not_rejected_for_a_folder_that_holds_another(
    tmp_path, scripted_engine, start_explorer
):
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready()
    begin(explorer, 0, 1)
    exchange(tmp_path, 1)
    explorer.stop()
    scripted_engine.start_on(tmp_path / "versions/v000000")
    again = start_explorer([scripted_engine.url], reload=SETTINGS)
    wait_until(lambda: shown(again)["state"] == "degraded")
    assert "is not the one that was published" in str(shown(again)["reason"])
    assert served(again) == "0" and states(again)[1] in ("SERVING", "RETIRED")
    put_back(tmp_path, 1)
    wait_until(lambda: served(again) == "1")


def test_what_an_engine_goes_back_to_is_not_rejected_for_it_either(tmp_path, scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready()
    begin(explorer, 0, 1, 2)
    exchange(tmp_path, 1)
    reject(explorer, 2)
    wait_until(lambda: served(explorer) == "0" and shown(explorer)["state"] == "degraded")
    assert states(explorer)[1] in ("SERVING", "RETIRED")


def test_an_engine_s_machine_that_has_another_folder_is_not_held_against_the_version(tmp_path):
    write_scripted_version(tmp_path / "root", 0, -1.0)
    stage = Stage(tmp_path / "root", tmp_path / "staged", keep=2)
    status, body = answer(stage, b'{"version": 0, "manifest_sha256": "%s"}' % (b"0" * 64))
    assert status == MISSING and "is not the one that was published" in str(body)
