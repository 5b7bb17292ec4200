"""What cannot start says why in one clear line, with the right exit status, without a traceback, at once."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import yaml

from shared.ledger.connect import Ledger
from tests.experiences import trainer_config
from tests.models import make_tiny_model
from tests.processes import run_flywheel, write_config
from tests.servers import free_port

COMMANDS = ["up", "engine", "explorer", "trainer"]


def config_file(tmp_path: Path, **changes) -> Path:
    tree = {
        "root_dir": str(tmp_path / "data"),
        "model": {"path": str(tmp_path / "base")},
        "explorer": {"port": free_port(), "engines": [{"name": "e0", "url": f"http://127.0.0.1:{free_port()}"}]},
    }
    for key, value in changes.items():
        section, _, leaf = key.partition("__")
        if leaf:
            tree.setdefault(section, {})[leaf] = value
        else:
            tree[section] = value
    file = tmp_path / "flywheel.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return file


def refusal(*arguments: str, status: int) -> str:
    """The one line that the command says before it ends with that status."""
    ended = run_flywheel(*arguments, timeout_s=60)
    assert ended.returncode == status, ended.stderr[-1500:]
    assert "Traceback" not in ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("flywheel: ")]
    return line


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_configuration_is_refused_with_status_2(command, tmp_path):
    file = config_file(tmp_path, trainer__batch_sise=8)
    line = refusal(command, "-c", str(file), status=2)
    assert line == "flywheel: trainer.batch_sise=8: no such key; did you mean 'batch_size'?"


def test_a_missing_configuration_file_is_named(tmp_path):
    assert "cannot be read" in refusal("up", "-c", str(tmp_path / "none.yaml"), status=2)


@pytest.mark.parametrize("command", ["up", "engine", "trainer"])
def test_a_missing_model_folder_is_named(command, tmp_path):
    line = refusal(command, "-c", str(config_file(tmp_path)), status=1)
    assert str(tmp_path / "base") in line and "model.path" in line


def test_a_folder_that_holds_no_weights_is_named(tmp_path):
    model = make_tiny_model(tmp_path / "base")
    (model / "model.safetensors").unlink()
    line = refusal("trainer", "-c", str(config_file(tmp_path)), status=1)
    assert str(model) in line


@pytest.mark.parametrize(("command", "setting"), [("up", "explorer.port"), ("explorer", "explorer.port")])
def test_a_port_in_use_is_named_with_its_setting(command, setting, tmp_path):
    make_tiny_model(tmp_path / "base")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        line = refusal(command, "-c", str(config_file(tmp_path, explorer__port=port)), status=1)
    assert f"127.0.0.1:{port}" in line and setting in line


def test_an_engines_port_in_use_is_named_with_its_setting(tmp_path):
    make_tiny_model(tmp_path / "base")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        engines = [{"name": "e0", "url": f"http://127.0.0.1:{port}"}]
        for command in ("up", "engine"):
            line = refusal(command, "-c", str(config_file(tmp_path, explorer__engines=engines)), status=1)
            assert f"127.0.0.1:{port}" in line and "explorer.engines 'e0'" in line


@pytest.mark.parametrize("command", COMMANDS)
def test_a_database_that_is_away_is_named_without_its_password(command, tmp_path):
    make_tiny_model(tmp_path / "base")
    url = f"postgresql://flywheel:secret@127.0.0.1:{free_port()}/flywheel"
    line = refusal(command, "-c", str(config_file(tmp_path, database_url=url)), status=1)
    assert "the database postgresql" in line and "is it up and reachable?" in line
    assert "secret" not in line


def test_a_file_that_is_no_database_is_named(tmp_path):
    make_tiny_model(tmp_path / "base")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "ledger.sqlite3").write_bytes(b"this is no database, " * 100)
    line = refusal("explorer", "-c", str(config_file(tmp_path)), status=1)
    assert "ledger.sqlite3" in line


def test_a_key_that_is_not_set_is_named(tmp_path):
    keys = [{"key_env": "FLYWHEEL_TEST_KEY_THAT_IS_NOT_SET".removeprefix("FLYWHEEL_"), "role": "admin"}]
    line = refusal("explorer", "-c", str(config_file(tmp_path, explorer__keys=keys)), status=2)
    assert "TEST_KEY_THAT_IS_NOT_SET" in line


def test_lora_training_is_refused_plainly(tmp_path):
    make_tiny_model(tmp_path / "base")
    file = config_file(tmp_path)
    tree = yaml.safe_load(file.read_text())
    tree["model"]["kind"] = "lora"
    file.write_text(yaml.safe_dump(tree))
    assert "model.kind='lora'" in refusal("trainer", "-c", str(file), status=2)


def test_a_damaged_base_version_is_named(tmp_path):
    from trainer_service.publish import ensure_base_version

    config = trainer_config(tmp_path / "data", make_tiny_model(tmp_path / "base"))
    ledger = Ledger.open(config.ledger_url)
    ensure_base_version(config, ledger)
    ledger.close()
    with (config.root / "versions/v000000/model.safetensors").open("r+b") as file:
        file.seek(200)
        file.write(b"garbage")
    file = write_config(config, tmp_path / "flywheel.yaml")
    for command in ("engine", "trainer"):
        line = refusal(command, "-c", str(file), status=1)
        assert "v000000" in line or "versions" in line


def test_help_and_a_wrong_configuration_come_without_heavy_imports(tmp_path):
    import subprocess
    import sys

    code = (
        "import sys; from services.cli import main; main(['up', '-c', 'none.yaml']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'fastapi', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
