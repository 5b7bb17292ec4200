"""What cannot start says why in one clear line, with the right exit status, without a traceback, at once."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml

from explorer_service.api.auth import Auth
from shared.config import LoraConfig, load_config
from shared.errors import ConfigError
from shared.ledger.connect import Ledger
from tests.support.experiences import trainer_config
from tests.support.lives import Lives
from tests.support.models import make_tiny_model
from tests.support.processes import run_flywheel, write_config
from tests.support.refusals import refusal
from tests.support.servers import free_port

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


@pytest.fixture
def refused(lives: Lives, tmp_path: Path) -> Callable[..., str]:
    """See `refusal`."""
    return partial(refusal, lives, tmp_path / "refused.log")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_configuration_is_refused_with_status_2(command, tmp_path, refused):
    file = config_file(tmp_path, trainer__batch_sise=8)
    line = refused(command, "-c", str(file), status=2)
    assert line == "flywheel: trainer.batch_sise=8: no such key; did you mean 'batch_size'?"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"pth": "base"}}, "model.pth='base': no such key; did you mean 'path'?"),
        ({"explorer__engines": [{"name": "e0", "uri": 1}]}, "explorer.engines.0.uri=1: no such key; did you mean 'u"),
        ({"model": {"author": "me"}}, "model.author='me': no such key; "),
        ({"explorer__two\nlines": 1}, r"'explorer.two\nlines'=1: no such key"),
        ({"explorer__keys": [{"key_env": "K", "role": "boss"}]}, "explorer.keys.0.role='boss': must be 'chat'"),
        (
            {"explorer__keys": [{"key_env": "K", "role": "chat", "requests_at_once": 0}]},
            "explorer.keys.0.requests_at_once=0: input should be greater than",
        ),
        ({"trainer__max_share_per_key": 2}, "trainer.max_share_per_key=2: input should be less than"),
    ],
    ids=str,
)
def test_one_line_names_the_key_and_the_value(changes, said, tmp_path):
    line = config_error(config_file(tmp_path, **changes))
    assert line.startswith(said) and len(line.splitlines()) == 1


def test_a_missing_configuration_file_is_named(tmp_path):
    """A process of its own: its exit status is that of the command."""
    ended = run_flywheel("up", "-c", str(tmp_path / "none.yaml"), timeout_s=240)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("flywheel: ") and "cannot be read" in line


@pytest.mark.parametrize("command", ["up", "engine", "trainer"])
def test_a_missing_model_folder_is_a_wrong_configuration(command, tmp_path, refused):
    line = refused(command, "-c", str(config_file(tmp_path)), status=2)
    assert str(tmp_path / "base") in line and "model.path" in line


def test_a_folder_that_holds_no_weights_is_named(tmp_path, refused):
    model = make_tiny_model(tmp_path / "base")
    (model / "model.safetensors").unlink()
    line = refused("trainer", "-c", str(config_file(tmp_path)))
    assert str(model) in line


@pytest.mark.parametrize(("command", "setting"), [("up", "explorer.port"), ("explorer", "explorer.port")])
def test_a_port_in_use_is_named_with_its_setting(command, setting, tmp_path, refused):
    make_tiny_model(tmp_path / "base")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        line = refused(command, "-c", str(config_file(tmp_path, explorer__port=port)))
    assert f"127.0.0.1:{port}" in line and setting in line


def test_an_engines_port_in_use_is_named_with_its_setting(tmp_path, refused):
    make_tiny_model(tmp_path / "base")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        engines = [{"name": "e0", "url": f"http://127.0.0.1:{port}"}]
        for command in ("up", "engine"):
            line = refused(command, "-c", str(config_file(tmp_path, explorer__engines=engines)))
            assert f"127.0.0.1:{port}" in line and "explorer.engines 'e0'" in line


@pytest.mark.parametrize("command", COMMANDS)
def test_a_database_that_is_away_is_named_without_its_password(command, tmp_path, refused):
    make_tiny_model(tmp_path / "base")
    url = f"postgresql://fw:secret@127.0.0.1:{free_port()}/fw?password=secret&sslpassword=secret&passfile=secret"
    line = refused(command, "-c", str(config_file(tmp_path, database_url=url)))
    assert "the database postgresql" in line and "is it up and reachable?" in line
    assert "secret" not in line


def test_a_file_that_is_no_database_is_named(tmp_path, refused):
    make_tiny_model(tmp_path / "base")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "ledger.sqlite3").write_bytes(b"this is no database, " * 100)
    line = refused("explorer", "-c", str(config_file(tmp_path)))
    assert "ledger.sqlite3" in line


def test_a_key_that_is_not_set_is_named(tmp_path, refused):
    keys = [{"key_env": "FLYWHEEL_TEST_KEY_THAT_IS_NOT_SET".removeprefix("FLYWHEEL_"), "role": "admin"}]
    line = refused("explorer", "-c", str(config_file(tmp_path, explorer__keys=keys)), status=2)
    assert "TEST_KEY_THAT_IS_NOT_SET" in line


CHAT_AND_ADMIN = [{"key_env": "CHAT_KEY", "role": "chat"}, {"key_env": "ADMIN_KEY", "role": "admin"}]


@pytest.mark.parametrize(
    ("chat", "admin", "said"),
    [
        ("a" * 32, "a" * 32, "'CHAT_KEY' and 'ADMIN_KEY' are the same key"),
        ("a" * 32, "short-key-of-15", "'ADMIN_KEY' has fewer than 16 characters"),
        ("a" * 32, " \t\n", "'ADMIN_KEY' is not set"),
    ],
)
def test_one_key_for_two_roles_and_keys_that_can_be_guessed_are_refused(chat, admin, said, tmp_path):
    file = config_file(tmp_path, explorer__keys=CHAT_AND_ADMIN)
    line = config_error(file, CHAT_KEY=chat, ADMIN_KEY=admin)
    assert said in line
    assert "aaaa" not in line and "short" not in line


SECRET = "sk-s3cr3t-p4ssword"


def config_error(file: Path, **environ: str) -> str:
    """What a start says of a configuration that it refuses."""
    with pytest.raises(ConfigError) as error:
        Auth(load_config(file, environ).explorer, environ)
    return str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"explorer__keys": [{"key": SECRET, "role": "chat"}]},
        {"explorer__keys": [{"key_env": SECRET, "role": "chat"}]},
        {"explorer__keys": [{"key_env": SECRET.replace("-", "_"), "role": "chat"}]},
        {"explorer__keys": [{"sha256": SECRET, "role": "chat"}]},
        {"explorer__keys": {"key": SECRET}},
        {"explorer__keys": [SECRET]},
        {"explorer__api_key": SECRET},
        {"explorer": [SECRET]},
        {"explorer__engines": [{"name": "e0", "url": f"http://u:{SECRET}@127.0.0.1:1"}]},
        {"explorer__engines": [{"name": "e0", "url": f"ftp://u:{SECRET}@127.0.0.1:1"}]},
        {"explorer__engines": {"name": "e0", "url": f"http://u:{SECRET}@127.0.0.1:1"}},
        {"explorer__engines": [{"name": "e0", "url": f"http://u:{SECRET}"}]},
        {"explorer__engines": [f"http://u:{SECRET}@127.0.0.1:1"]},
        {"explorer__engines": f"http://u:{SECRET}@127.0.0.1:1"},
        {"explorer__keys": [{"secret": SECRET, "role": "chat"}]},
        {"explorer__keys": [{"value": SECRET, "role": "chat"}]},
        {"database_url": f"mysql://u:{SECRET}@db/x"},
        {"database_url": f"host=db password={SECRET}"},
        {"database_url": f"postgresql://u:{SECRET}/#@db/x"},
        {"database_url": f"postgresql://u:{SECRET}"},
        {"database_url": [SECRET]},
        {"databse_url": f"postgresql://u:{SECRET}@db/x"},
        *({key: f"password={SECRET}"} for key in ("database", "dsn", "explorer__pw", "engine__auth", "engine__pass")),
        {"engine__admin_token": SECRET + "\n"},
        {"engine__admin_token": [SECRET]},
        {"trainer": {"algorithm": "distill", "distill": {"url": f"http://u:{SECRET}@t:1"}}},
        {"trainer": {"algorithm": "distill", "distill": {"url": f"ftp://u:{SECRET}@t:1"}}},
        {"trainer": {"algorithm": "distill", "distill": {"url": f"http://t:1?key={SECRET}"}}},
        {"trainer": {"algorithm": "distill", "distill": {"url": f"http://u:{SECRET}@t:1", "path": "x"}}},
    ],
    ids=str,
)
def test_no_error_of_the_configuration_shows_a_secret(changes, tmp_path):
    assert "s3cr3t" not in config_error(config_file(tmp_path, **changes))


@pytest.mark.parametrize(
    "environ",
    [
        {"FLYWHEEL_DATABASE_URL": f"postgresql://u:{SECRET}: {{#@db/x"},
        {"FLYWHEEL_DATABASE__URL": SECRET},
        {"FLYWHEEL_ENGINE__ADMIN_TOKEN": f"{SECRET}: ["},
        {"FLYWHEEL_EXPLORER__KEYS": f"[{{key: {SECRET}]"},
        {"FLYWHEEL_EXPLORER__KEYS__CHAT": SECRET},
    ],
    ids=str,
)
def test_no_error_of_the_environment_shows_a_secret(environ, tmp_path):
    assert "s3cr3t" not in config_error(config_file(tmp_path), **environ)


def test_a_line_that_is_not_yaml_is_named_by_its_place_and_not_by_its_text(tmp_path):
    file = tmp_path / "flywheel.yaml"
    for line in (f"database_url: *{SECRET}", f"database_url: !{SECRET} x", f"engine: {{admin_token: {SECRET}"):
        file.write_text(line)
        assert "s3cr3t" not in config_error(file)


def test_a_url_in_the_environment_is_text_and_no_yaml(tmp_path, refused):
    url = f"postgresql://u:{SECRET}: {{&@127.0.0.1:{free_port()}/x"
    line = refused("explorer", "-c", str(config_file(tmp_path)), FLYWHEEL_DATABASE_URL=url)
    assert "is it up and reachable?" in line and "s3cr3t" not in line


@pytest.mark.parametrize(
    ("lora", "expected"),
    [
        (
            {"use_dora": True},
            "model.lora.use_dora=True cannot be trained: engines do not load DoRA",
        ),
        ({"bias": "all"}, "model.lora.bias='all' cannot be trained: engines do not load biases of adapters; remove it"),
        ({"modules_to_save": ["lm_head"]}, "engines load no whole modules beside an adapter"),
        ({"rank": 513}, "model.lora.rank=513: input should be less than or equal to 512"),
        ({"targets": ["q_proj", "lm_head"]}, "'lm_head' is an embedding or the output layer"),
        ({"targets": ["embed_tokens"]}, "'embed_tokens' is an embedding or the output layer"),
        ({"targets": ["q_proj", "q_proj"]}, "'q_proj' appears twice"),
        ({"dropout": 0.1}, "would score each batch by another policy than it trains; set 0"),
    ],
)
def test_an_adapter_that_engines_would_not_serve_is_refused_with_the_reason(lora, expected, tmp_path):
    assert expected in config_error(config_file(tmp_path, model={"path": "base", "kind": "lora", "lora": lora}))


def test_deltas_of_adapters_are_refused(tmp_path):
    changes = {"model": {"path": "base", "kind": "lora"}, "versions": {"delta": True}}
    assert "versions.delta=true is for model.kind: full" in config_error(config_file(tmp_path, **changes))


def test_the_rank_that_engines_reserve_is_the_next_that_vllm_takes():
    ranks = {1: 1, 2: 8, 8: 8, 12: 16, 33: 64, 257: 320, 321: 512, 512: 512}
    assert {rank: LoraConfig(rank=rank).engine_rank for rank in ranks} == ranks


def test_a_damaged_base_version_is_named(tmp_path, refused):
    from trainer_service.base_version import ensure_base_version

    config = trainer_config(tmp_path / "data", make_tiny_model(tmp_path / "base"))
    ledger = Ledger.open(config.ledger_url)
    ensure_base_version(config, ledger)
    ledger.close()
    with (config.root / "versions/v000000/model.safetensors").open("r+b") as file:
        file.seek(200)
        file.write(b"garbage")
    file = write_config(config, tmp_path / "flywheel.yaml")
    for command in ("engine", "trainer"):
        line = refused(command, "-c", str(file))
        assert "v000000" in line or "versions" in line


def test_what_a_command_writes_is_for_its_user_alone(tmp_path):
    file = config_file(tmp_path)
    assert run_flywheel("migrate", "-c", str(file), timeout_s=240).returncode == 0
    written = [tmp_path / "data", *(tmp_path / "data").rglob("*")]
    assert any(path.name == "ledger.sqlite3" for path in written)
    assert not [path for path in written if path.stat().st_mode & 0o077]
