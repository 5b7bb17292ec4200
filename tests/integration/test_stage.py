"""An engine's machine stages versions while the engine serves, behind the engine's gate over real HTTP."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn

from explorer_service.engines.admin import EngineAdmin, open_client
from explorer_service.errors import EngineRefused
from services.engine import stage as staging
from services.engine.gate import ADMIN_HEADER, ADMIN_VARIABLE, STAGE_VARIABLE, EngineGate
from services.engine.stage import NO_DISK, Stage, answer, serve_stage
from shared.config import Config
from shared.errors import StartupError, VersionError, VersionMissing
from tests.support.deltas import FILES, Weights, contents
from tests.support.servers import free_port, wait_until

TOKEN = {ADMIN_HEADER: "obey"}


class GatedEngine:
    """The gate of an engine that stages into a folder of its own, on a free port."""

    def __init__(self) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._server = uvicorn.Server(
            uvicorn.Config(EngineGate(_no_route), port=port, log_level="error", lifespan="off")
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started)

    def ask(self, body: object, **headers: str) -> httpx.Response:
        return httpx.post(self.url + "/flywheel/stage", json=body, headers={**TOKEN, **headers}, timeout=120)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(120)


async def _no_route(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 404, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


@pytest.fixture
def weights(tmp_path) -> Weights:
    weights = Weights(tmp_path / "root", anchor_every=4)
    for version in range(4):
        weights.publish(version)
    return weights


@pytest.fixture
def config(tmp_path) -> Config:
    return Config.model_validate(
        {
            "root_dir": str(tmp_path / "root"),
            "model": {"path": "base"},
            "engine": {"staging_dir": str(tmp_path / "own disk")},
            "versions": {"delta": True},
        }
    )


@pytest.fixture
def engine(weights, config, monkeypatch) -> Iterator[GatedEngine]:
    with serve_stage(config, "e0") as served:
        assert served is not None
        monkeypatch.setenv(ADMIN_VARIABLE, "obey")
        monkeypatch.setenv(STAGE_VARIABLE, served[1])
        engine = GatedEngine()
        yield engine
        engine.stop()


def test_a_version_is_staged_whole_whatever_its_form_and_once(engine, weights, tmp_path):
    for version in range(4):
        reply = engine.ask({"version": version})
        assert reply.status_code == 200
        folder = Path(reply.json()["path"])
        assert folder.is_relative_to(tmp_path / "own disk" / "e0")
        assert contents(folder).keys() == {*FILES, "config.json"}
    written = (folder / FILES[0]).stat().st_mtime_ns
    assert engine.ask({"version": 3}).json() == reply.json()
    assert (folder / FILES[0]).stat().st_mtime_ns == written
    assert (
        contents(folder).items()
        >= {name: e.sha256 for name, e in staging.read_chain(weights.root, 3)[-1].manifest.whole.items()}.items()
    )


def test_an_engine_whose_name_begins_like_another_has_a_folder_of_its_own(config, weights):
    with serve_stage(config, "gpu/1") as served:
        assert served is not None
        folder = served[0].stage(2)
        with serve_stage(config, "gpu"):
            assert contents(folder).keys() == {*FILES, "config.json"}


@pytest.mark.parametrize("entry", ["config.json", "v000001", "v000001-0123456789abcdeg", ".tmp.bak"])
def test_a_folder_with_anything_but_staged_versions_is_refused_and_keeps_it(entry, config, tmp_path):
    """The engine is named as the model in the folder of models, for example."""
    folder = tmp_path / "own disk" / "e0"
    staged = folder / "v000001-0123456789abcdef"
    staged.mkdir(parents=True)
    (staged / "config.json").touch()
    (folder / entry).mkdir()
    refusal = f"{folder} holds {entry}, .*set engine.staging_dir"
    with pytest.raises(StartupError, match=refusal), serve_stage(config, "e0"):
        pass
    assert {one.name for one in folder.iterdir()} == {entry, staged.name}
    assert (staged / "config.json").exists()


def test_a_second_engine_on_the_same_folder_is_refused_while_the_first_one_runs(config, weights):
    with serve_stage(config, "e0") as served:
        assert served is not None
        folder = served[0].stage(2)
        with pytest.raises(StartupError, match=r"another engine uses .*e0; "), serve_stage(config, "e0"):
            pass
        assert contents(folder).keys() == {*FILES, "config.json"}
    with serve_stage(config, "e0"):
        assert not folder.exists()


def test_a_folder_for_temporary_files_whose_name_is_too_long_for_a_socket_is_refused(config, tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(StartupError, match="TMPDIR"), serve_stage(config, "e0"):
        pass
    assert not list(long.iterdir())


def test_requests_for_one_version_at_once_are_one_copy(engine, tmp_path):
    replies: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: replies.append(engine.ask({"version": 2}))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {reply.json()["path"] for reply in replies} == {str(next((tmp_path / "own disk" / "e0").iterdir()))}


def test_only_who_holds_the_token_may_ask_and_only_for_a_version(engine):
    assert httpx.post(engine.url + "/flywheel/stage", json={"version": 1}, timeout=120).status_code == 403
    for body in ({}, {"version": "../x"}, {"version": 1.5}, [], None):
        assert engine.ask(body).status_code == 400
    assert engine.ask({"version": 1, "x": "y" * 20_000}).status_code == 413
    assert engine.ask({"version": 1, "in_use": list(range(2000))}).status_code == 200
    assert "is not the one that was published" in engine.ask({"version": 1, "manifest_sha256": "0" * 64}).text
    assert httpx.get(engine.url + "/flywheel/stage", headers=TOKEN, timeout=120).status_code == 404
    for number in (-1, 77, 10**400):
        assert engine.ask({"version": number}).status_code in (400, 409), number


def test_the_last_versions_asked_for_stay_and_older_ones_go(weights, tmp_path):
    stage = Stage(weights.root, tmp_path / "staged", keep=2)
    folders = [stage.stage(version) for version in (0, 1, 0, 2)]
    assert sorted(folder.name for folder in (tmp_path / "staged").iterdir()) == sorted(
        {folders[0].name, folders[3].name}
    )


def test_a_staged_version_that_was_damaged_is_no_base_for_the_next(weights, tmp_path):
    stage = Stage(weights.root, tmp_path / "staged", keep=2)
    damaged = stage.stage(1)
    (damaged / FILES[0]).write_bytes(b"x" * 9)
    assert (
        contents(stage.stage(2)).items()
        >= {
            name: entry.sha256 for name, entry in staging.read_chain(weights.root, 2)[-1].manifest.whole.items()
        }.items()
    )


@pytest.mark.parametrize("version", [0, 2])
def test_a_staged_version_of_which_files_are_gone_is_staged_anew(weights, tmp_path, version):
    stage = Stage(weights.root, tmp_path / "staged", keep=2)
    folder = stage.stage(version)
    before = contents(folder)
    for file in folder.iterdir():
        file.unlink()
    assert stage.stage(version) == folder
    assert contents(folder) == before
    (folder / FILES[0]).write_bytes(b"half")
    assert contents(stage.stage(version)) == before


def test_a_version_that_is_not_as_it_was_published_gets_no_name(weights, tmp_path):
    stage = Stage(weights.root, tmp_path / "staged", keep=2)
    stage.stage(1)
    delta = weights.folder(2) / "model-00001-of-00002.delta.safetensors"
    data = bytearray(delta.read_bytes())
    data[-1] ^= 1
    delta.write_bytes(data)
    with pytest.raises(VersionError, match=r"v000002: .* does not match its sha256"):
        stage.stage(2)
    assert [folder.name[:7] for folder in (tmp_path / "staged").iterdir()] == ["v000001"]


def test_what_an_earlier_process_staged_is_staged_again(weights, tmp_path):
    first = Stage(weights.root, tmp_path / "staged", keep=2).stage(1)
    (first / FILES[0]).write_bytes(b"lost in a power cut")
    (tmp_path / "staged" / ".tmp").mkdir()
    again = Stage(weights.root, tmp_path / "staged", keep=2)
    assert not list((tmp_path / "staged").iterdir())
    assert (again.stage(1) / FILES[0]).stat().st_size > 1000
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match="staging_dir cannot be written"):
        Stage(weights.root, tmp_path / "file" / "below", keep=2)


def admin(client: httpx.AsyncClient, url: str) -> EngineAdmin:
    return EngineAdmin(client, url, "agent", 120.0, token="obey")


async def test_an_explorer_learns_the_folder_or_why_there_is_none(engine, weights, tmp_path):
    async with open_client() as client:
        assert await admin(client, engine.url).stage(2, None) == next((tmp_path / "own disk" / "e0").iterdir())
        with pytest.raises(VersionMissing, match="cannot be read"):
            await admin(client, engine.url).stage(9, None)
        (weights.folder(3) / "config.json").write_text("{}")
        with pytest.raises(VersionError, match=r"config.json\\?' does not match"):
            await admin(client, engine.url).stage(3, None)


async def test_a_disk_that_is_full_is_the_engines_trouble_and_leaves_nothing(engine, tmp_path, monkeypatch):
    copy = staging.copy_version

    def copy_to_full_disk(chain, target, bases=None):
        (target / "config.json").symlink_to("/dev/full")
        return copy(chain, target, bases)

    with monkeypatch.context() as patch:
        patch.setattr(staging, "copy_version", copy_to_full_disk)
        async with open_client() as client:
            with pytest.raises(EngineRefused, match=r"No space left on device.*; free space there"):
                await admin(client, engine.url).stage(1, None)
    assert not list((tmp_path / "own disk" / "e0").iterdir())
    assert engine.ask({"version": 1}).status_code == 200


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_an_error_in_reading_root_dir_is_not_called_a_lack_of_space(number, weights, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    stage = Stage(weights.root, tmp_path / "staged", keep=2)
    monkeypatch.setattr(staging, "copy_version", fail)
    status, body = answer(stage, b'{"version": 1}')
    assert status == NO_DISK and os.strerror(number) in str(body)
    assert "root_dir" in str(body) and "free space" not in str(body)


async def test_an_engine_without_a_folder_for_it_stages_nothing(monkeypatch, weights):
    monkeypatch.setenv(ADMIN_VARIABLE, "obey")
    monkeypatch.delenv(STAGE_VARIABLE, raising=False)
    engine = GatedEngine()
    async with open_client() as client:
        assert await admin(client, engine.url).stage(1, None) is None
    engine.stop()


async def test_an_engine_whose_parent_process_has_gone_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv(ADMIN_VARIABLE, "obey")
    monkeypatch.setenv(STAGE_VARIABLE, str(tmp_path / "nobody"))
    engine = GatedEngine()
    assert engine.ask({"version": 1}).status_code == 503
    engine.stop()
