"""A newcomer's slips: each is one clear line, nothing is deleted and nothing is half-written."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from services import cli
from services.engine.output import EngineOutput
from shared.config import Config
from shared.errors import StartupError
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import list_versions
from tests.support.experiences import trainer_config
from tests.support.lives import Lives
from tests.support.models import make_tiny_model
from tests.support.processes import run_flywheel, run_here, write_config
from tests.support.refusals import refusal
from tests.support.servers import free_port, make_config, publish, served, wait_until, write_scripted_version
from trainer_service.base_version import ensure_base_version


@pytest.fixture
def trained(tmp_path: Path) -> Config:
    """A root folder with three versions, and the ledger that names them."""
    model = make_tiny_model(tmp_path / "base")
    config = trainer_config(tmp_path / "data", model)
    explorer = {"port": free_port(), "engines": [{"name": "e0", "url": f"http://127.0.0.1:{free_port()}"}]}
    config = Config.model_validate({**config.model_dump(exclude_unset=True), "explorer": explorer})
    ledger = Ledger.open(config.ledger_url)
    ensure_base_version(config, ledger)
    for version in (1, 2):
        write_scripted_version(config.root, version, -1.0)
        with ledger.write() as connection:
            transitions.publish(connection, version=version, parent=version - 1, kind="full", step=version)
    ledger.close()
    return config


def contents(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in (root / "versions").rglob("*") if path.is_file()}


@pytest.fixture
def line_of(lives: Lives) -> Callable[..., str]:
    """What the command says that refuses this configuration; see `refusal`."""

    def line_of(command: str, config: Config, status: int = 1, **environ: str) -> str:
        file = write_config(config, config.root.parent / "f.yaml")
        return refusal(lives, file.with_suffix(".log"), command, "-c", str(file), status=status, **environ)

    return line_of


@pytest.mark.parametrize("command", ["up", "explorer"])
def test_a_wrong_database_is_refused_and_nothing_is_deleted(command, trained, tmp_path, line_of):
    before = contents(trained.root)
    line = line_of(command, trained, FLYWHEEL_DATABASE_URL=f"sqlite:///{tmp_path}/new.sqlite3")
    assert "holds v000001, v000002" in line and "database_url" in line
    assert contents(trained.root) == before


@pytest.mark.parametrize("command", ["up", "explorer"])
def test_a_wrong_root_is_refused_and_no_version_is_rejected(command, trained, tmp_path, line_of):
    moved = trained.model_copy(update={"root_dir": str(tmp_path / "empty"), "database_url": trained.ledger_url})
    line = line_of(command, moved)
    assert "names versions up to v000002" in line and "root_dir" in line
    ledger = Ledger.open(trained.ledger_url)
    with ledger.read() as connection:
        assert "REJECTED" not in {row.state for row in list_versions(connection)}
    ledger.close()


def test_a_folder_that_is_unmounted_while_the_explorer_runs_rejects_no_version_and_engines_serve_on(
    tmp_path, scripted_engine, start_explorer
):
    explorer = start_explorer([scripted_engine.url]).wait_ready()
    publish(explorer, 1)
    wait_until(lambda: served(explorer) == "1")
    shutil.move(tmp_path / "versions", tmp_path / "elsewhere")
    with explorer.ledger.write() as connection:
        transitions.publish(connection, version=2, parent=1, kind="full", step=2)
    engine = explorer.deps.pool.engines[0]
    wait_until(lambda: "is root_dir mounted?" in engine.reason)
    assert [served(explorer) for _ in range(5)] == ["1"] * 5 and engine.state == "degraded"
    shutil.move(tmp_path / "elsewhere", tmp_path / "versions")
    write_scripted_version(tmp_path, 2, -2.0)
    wait_until(lambda: engine.version == 2)


@pytest.mark.parametrize("command", ["engine", "trainer"])
def test_a_wrong_model_is_refused_and_nothing_is_deleted(command, trained, tmp_path, line_of):
    before = contents(trained.root)
    other = make_tiny_model(tmp_path / "other", seed=1)
    config = trained.model_copy(update={"model": trained.model.model_copy(update={"path": str(other)})})
    line = line_of(command, config, status=2)  # which `flywheel up` does not try again
    assert "began with the model" in line and str(other) in line
    assert contents(trained.root) == before


@pytest.mark.parametrize("command", ["engine", "trainer", "explorer", "status"])
def test_a_root_folder_that_cannot_be_made_is_named(command, tmp_path, lives):
    make_tiny_model(tmp_path / "base")
    (tmp_path / "file").write_text("no folder")
    config = make_config(tmp_path / "file" / "data", [f"http://127.0.0.1:{free_port()}"], port=free_port())
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path / "base")})})
    file = write_config(config, tmp_path / "f.yaml")
    assert str(tmp_path / "file") in refusal(lives, tmp_path / "f.log", command, "-c", str(file), status=1)
    assert (tmp_path / "file").read_text() == "no folder"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT], ids=os.strerror)
def test_what_the_file_system_refuses_is_one_line_in_every_command(number, monkeypatch, capsys):
    def refuse(_args: object) -> int:
        raise OSError(number, os.strerror(number), "/data/versions")

    monkeypatch.setattr(cli.COMMANDS["status"], "run", refuse)
    before = os.umask(0o077)
    try:
        assert cli.main(["status", "-c", "x"]) == 1
    finally:
        os.umask(before)
    said = capsys.readouterr().err
    assert said.startswith(f"flywheel: /data/versions: {os.strerror(number)}; ") and said.count("\n") == 1


def test_an_engine_goes_on_when_its_log_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    for file in (Path("/dev/full"), tmp_path / "file" / "vllm.log"):
        with subprocess.Popen(["seq", "100000"], stdout=subprocess.PIPE) as process:
            output = EngineOutput(process.stdout, file)
            assert process.wait(240) == 0
            output._thread.join(240)
            assert output.reason(in_service=False).startswith("98001 ")


def test_a_reader_that_has_seen_enough_of_the_output_ends_the_command_without_a_traceback():
    readable, writable = os.pipe()
    os.close(readable)
    command = [sys.executable, "-m", "services.cli", "demo", "--list"]
    ended = subprocess.run(command, stdout=writable, stderr=subprocess.PIPE, text=True, timeout=240, check=False)
    os.close(writable)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_what_a_terminal_of_another_encoding_cannot_show_is_escaped(tmp_path):
    config = make_config(tmp_path, ["http://127.0.0.1:1"])
    ledger = Ledger.open(config.ledger_url)
    with ledger.write() as connection:
        transitions.publish(connection, version=0, parent=None, kind="full", step=0)
        transitions.tag_version(connection, 0, "größte")
    ledger.close()
    file = write_config(config, tmp_path / "f.yaml")
    ended = run_flywheel("versions", "-c", str(file), timeout_s=240, PYTHONIOENCODING="ascii")
    assert ended.returncode == 0, ended.stderr
    assert r"gr\xf6\xdfte" in ended.stdout


def test_a_model_is_exported_into_the_empty_folder_that_one_stands_in(tmp_path, monkeypatch):
    config = make_config(tmp_path / "data", ["http://127.0.0.1:1"])
    ledger = Ledger.open(config.ledger_url)
    with ledger.write() as connection:
        transitions.publish(connection, version=0, parent=None, kind="full", step=0)
    ledger.close()
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    with pytest.raises(StartupError, match=r"version 0 cannot be exported: .*restore its folder"):
        run_here(config, "export-model", "--version", "0", "--to", ".")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    "call",
    [["erase", "--key"], ["erase", "--message"], ["export", "--out", "x.jsonl", "--task"], ["versions", "tag", "1"]],
)
def test_a_name_that_is_no_utf8_is_refused_before_the_ledger_sees_it(call, tmp_path, capsys):
    with pytest.raises(SystemExit) as refused:
        run_here(make_config(tmp_path, ["http://127.0.0.1:1"]), *call, "caf\udce9")
    assert refused.value.code == 2
    assert r"'caf\udce9' is not UTF-8; write it as it was recorded" in capsys.readouterr().err
