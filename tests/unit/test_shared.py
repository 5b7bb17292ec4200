"""Configuration, token encoding and version folders."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from shared.config import load_config
from shared.errors import ConfigError, VersionError
from shared.experience import CorruptTokens, Tokens
from shared.versions import verify_version
from tests.support.servers import write_scripted_version


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "flywheel.yaml"
    file.write_text(text)
    return file


def test_a_minimal_file_gives_the_documented_defaults(tmp_path):
    config = load_config(write(tmp_path, "model: {path: ./base}\nengine: {staging_dir: own}"), {})
    assert config.engine.staging_dir == str(tmp_path / "own")
    config = load_config(
        write(tmp_path, "model: {path: b}\ntrainer: {algorithm: distill, distill: {path: teacher}}"), {}
    )
    assert config.trainer.distill.path == str(tmp_path / "teacher")
    config = load_config(write(tmp_path, "model: {path: ./base}"), {})
    assert config.root == tmp_path / "flywheel-data"
    assert config.model.path == str(tmp_path / "base")
    assert config.ledger_url == f"sqlite:///{tmp_path / 'flywheel-data' / 'ledger.sqlite3'}"
    assert (config.explorer.host, config.explorer.port) == ("127.0.0.1", 8010)
    assert [engine.url for engine in config.explorer.engines] == ["http://127.0.0.1:8101"]


def test_environment_variables_override_the_file(tmp_path):
    environ = {
        "FLYWHEEL_EXPLORER__PORT": "8020",
        "FLYWHEEL_TRAINER__DEEPSPEED": "{zero_optimization: {stage: 2}}",
        "FLYWHEEL_DATABASE_URL": "postgresql://u:p@db/x",
        "OTHER": "1",
    }
    config = load_config(write(tmp_path, "model: {path: /m}\nexplorer: {port: 1}"), environ)
    assert config.explorer.port == 8020
    assert config.trainer.deepspeed == {"zero_optimization": {"stage": 2}}
    assert config.ledger_url == "postgresql+psycopg://u:p@db/x"


@pytest.mark.parametrize("text", ["", "null"])
def test_an_environment_variable_without_a_value_restores_the_default(tmp_path, text):
    file = write(tmp_path, "model: {path: /m}\ndatabase_url: postgresql://u:p@db/x")
    assert load_config(file, {"FLYWHEEL_DATABASE_URL": text}).database_url is None


def test_a_variable_sets_a_metric_s_weight_whatever_the_file_s_spelling_of_its_name(tmp_path):
    file = tmp_path / "flywheel.yaml"
    file.write_text("model: {path: base}\nreward: {metrics: {F1: 0.5, solved: 1}}")
    environ = {"FLYWHEEL_REWARD__METRICS__F1": "2", "FLYWHEEL_REWARD__METRICS__SPEED": "0.1"}
    assert load_config(file, environ).reward.metrics == {"F1": 2.0, "solved": 1.0, "speed": 0.1}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("model: {path: m}\nexplorer: {prot: 1}", ["explorer.prot=1", "did you mean 'port'"]),
        ("model: {path: m}\nexplorer: {port: '80'}", ["explorer.port='80'", "integer"]),
        ("model: {path: m}\nexplorer: {port: 0}", ["explorer.port=0", "greater than or equal to 1"]),
        ("model: {path: m}\nexplorer: {host: 0.0.0.0}", ["explorer.host='0.0.0.0'", "explorer.keys", "127.0.0.1"]),
        ("model: {path: m, kind: half}", ["model.kind='half'", "'full' or 'lora'"]),
        ("model: {path: m}\ntrainer: {batch_size: -1}", ["trainer.batch_size=-1"]),
        ("model: {path: m}\ntrainer: {learning_rate: .nan}", ["trainer.learning_rate=nan"]),
        ("model: {path: m}\ndatabase_url: mysql://x:secret@y/z", ["database_url", "postgresql://"]),
        ("model: {path: m}\nversions: {delta: true}", ["versions.delta", "engine.staging_dir"]),
        (
            "model: {path: m}\nengine: {extra_args: ['--override-generation-config.temperature=0.5']}",
            ["engine.extra_args", "'--override-generation-config.temperature=0.5'", "generation_config.json"],
        ),
        ("model: {path: m}\nengine: {extra_args: [--logprobs_mode, raw_logits]}", ["'--logprobs_mode'", "sampled by"]),
        ("explorer: {}", ["model is missing"]),
        ("model: {path: m}\nexplorer: {engines: []}", ["explorer.engines=[]: must have at least 1 entry; add one"]),
        ("model: {path: m}\nreward: {clip: [0, 1, 2]}", ["reward.clip: must have at most 2 entries; remove the other"]),
        ("model: {path: m}\nexplorer:", ["explorer=None: must be a section; write its keys below it, or remove it"]),
        ("model: m", ["model='m': must be a section; write its keys below it"]),
        ("model: {path: m}\nexplorer: {keys: [k]}", ["explorer.keys.0: must be a section; write its keys below it"]),
        ("model: {path: m}\nreward: {metrics: [x]}", ["reward.metrics: must be a section; write its keys below it"]),
        (
            "model: {path: m}\nexplorer: {allowed_hosts: a}",
            ["explorer.allowed_hosts='a': must be a list; write it in brackets, as in [a, b]"],
        ),
        ("model: {path: m}\nexplorer: {keys: {key_env: secret}}", ["explorer.keys: must be a list; write it in brac"]),
        *(
            (
                f"model: {{path: m}}\nexplorer: {{engines: [{{name: e0, url: '{url}'}}]}}",
                ["explorer.engines 'e0': the url is no address; write http://HOST:PORT, without a path"],
            )
            for url in ("http://h:8101/", "http://h:8101/v1", "h:8101", "ftp://u:secret@h", "http://", "http://h?x=1")
        ),
        (
            "model: {path: m}\nexplorer: {engines: [{name: gpu/0, url: 'http://h'}]}",
            ["explorer.engines.0.name='gpu/0': must be letters, digits and . _ -, beginning with a letter"],
        ),
        ("model: {path: m, name: a b}", ["model.name='a b': must be letters, digits and . _ - /, beginning"]),
        (
            "model: {path: m}\nexplorer: {allowed_hosts: ['a:80']}",
            ["explorer.allowed_hosts.0='a:80': must be a host name or an IP address, without a port; correct it"],
        ),
        (
            "model: {path: m}\nexplorer: {keys: [{key_env: sk-1, role: chat}]}",
            ["explorer.keys.0.key_env: must be the name of an environment variable; correct it"],
        ),
        (
            "model: {path: m}\ntrainer: {algorithm: hint, hint: {comment: No.}}",
            ["trainer.hint.comment='No.': must be a text with {text} in it once, and without other braces; correct it"],
        ),
        ("model: {path: m", ["is not YAML", "line"]),
        ("- 1", ["holds a list"]),
        ("", ["model is missing"]),
    ],
)
def test_a_wrong_file_gives_one_line_with_key_value_and_mend(tmp_path, text, parts):
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, text), {})
    message = str(error.value)
    assert "\n" not in message
    assert "secret" not in message
    for part in parts:
        assert part in message


SERVICE_LINKS = {
    "FLYWHEEL_SERVICE_HOST": "10.0.0.7",
    "FLYWHEEL_SERVICE_PORT": "8020",
    "FLYWHEEL_SERVICE_PORT_HTTP": "8020",
    "FLYWHEEL_PORT": "tcp://10.0.0.7:8020",
    "FLYWHEEL_PORT_8020_TCP": "tcp://10.0.0.7:8020",
    "FLYWHEEL_PORT_8020_TCP_PROTO": "tcp",
    "FLYWHEEL_PORT_8020_TCP_PORT": "8020",
    "FLYWHEEL_PORT_8020_TCP_ADDR": "10.0.0.7",
    "FLYWHEEL_EXPLORER_SERVICE_HOST": "10.0.0.8",
    "FLYWHEEL_EXPLORER_PORT": "tcp://10.0.0.8:8010",
}


def test_what_kubernetes_sets_for_a_service_of_our_name_is_no_setting(tmp_path):
    file = write(tmp_path, "model: {path: m}")
    assert load_config(file, SERVICE_LINKS) == load_config(file, {})
    for variable, value in (("FLYWHEEL_PORT", "8020"), ("FLYWHEEL_HOST", "10.0.0.7")):
        with pytest.raises(ConfigError, match=f"{variable} names no setting"):
            load_config(file, {variable: value})


def test_a_missing_file_and_an_unknown_variable_are_reported_plainly(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "nowhere.yaml", {})
    with pytest.raises(ConfigError, match="FLYWHEEL_NONSENSE names no setting; unset it, or write __ between"):
        load_config(write(tmp_path, "model: {path: m}"), {"FLYWHEEL_NONSENSE": "1"})


def tokens(prompt: int = 3, reply: int = 2, logprobs: int | None = None) -> Tokens:
    n = reply if logprobs is None else logprobs
    return Tokens(np.arange(prompt, dtype=np.int32), np.arange(reply, dtype=np.int32), -np.ones(n, np.float32))


def assert_same(before: Tokens, after: Tokens) -> None:
    for name in ("prompt_ids", "reply_ids", "logprobs"):
        np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
        assert getattr(after, name).dtype == getattr(before, name).dtype


@pytest.mark.parametrize(("largest", "width"), [(0xFFFF, 2), (0x10000, 3), (151_935, 3), (1 << 24, 4), (2**31 - 1, 4)])
def test_tokens_come_back_from_bytes_as_they_were(largest, width):
    before = tokens(5, 3)
    before.reply_ids[1] = largest
    assert_same(before, Tokens.decode(before.encode()))
    assert len(before.encode()) == 16 + width * (5 + 3) + 4 * 3


def test_tokens_of_the_first_layout_are_read():
    before = tokens(2, 1)
    arrays = struct.pack("<3i", 0, 1, 0) + struct.pack("<f", -1.0)
    assert_same(before, Tokens.decode(struct.pack("<4sB3xII", b"FWTK", 1, 2, 1) + arrays))


@pytest.mark.parametrize(
    "damage", [b"", b"short", b"XXXX" + bytes(40), tokens().encode()[:-1], tokens().encode() + b"x"]
)
def test_bytes_that_are_not_ours_are_refused(damage):
    with pytest.raises(CorruptTokens):
        Tokens.decode(damage)


@pytest.mark.parametrize(
    "bad",
    [
        tokens(reply=2, logprobs=1),
        tokens(prompt=0),
        tokens(reply=0),
        Tokens(np.ones(1, np.int32), np.ones(1, np.int32), np.array([np.nan], np.float32)),
        Tokens(np.ones(1, np.int32), np.ones(1, np.int32), np.array([0.5], np.float32)),
    ],
)
def test_arrays_that_do_not_agree_are_found(bad):
    with pytest.raises(CorruptTokens):
        bad.check()


def test_a_version_verifies_until_a_file_changes(tmp_path):
    folder = write_scripted_version(tmp_path, 3, -1.0)
    assert verify_version(folder).version == 3
    assert [path.name for path in (tmp_path / "versions").iterdir()] == ["v000003"]
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"X")
    with pytest.raises(VersionError, match=r"model\.safetensors' does not match its sha256"):
        verify_version(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(VersionError, match="cannot be read"):
        verify_version(folder)
    (folder / "MANIFEST.json").write_text("{")
    with pytest.raises(VersionError, match="damaged"):
        verify_version(folder)


def test_what_a_crash_left_under_a_versions_name_is_replaced(tmp_path):
    left = tmp_path / "versions" / "v000001"
    left.mkdir(parents=True)
    (left / "rubbish").touch()
    folder = write_scripted_version(tmp_path, 1, -1.0)
    assert sorted(path.name for path in folder.iterdir()) == ["MANIFEST.json", "model.safetensors"]
    assert json.loads((folder / "MANIFEST.json").read_text())["parent"] == 0


@pytest.mark.parametrize(
    ("config", "dtype"),
    [({"dtype": "float32"}, "float32"), ({"torch_dtype": "bfloat16"}, "bfloat16"), ({}, "auto")],
)
def test_the_engine_serves_weights_in_the_type_they_were_saved_in(config, dtype, tmp_path):
    import json

    from services.engine.launch import saved_dtype

    (tmp_path / "config.json").write_text(json.dumps(config))
    assert saved_dtype(tmp_path) == dtype


def test_a_signal_at_any_moment_stops_and_never_hangs():
    """Thousands of signals into a process that waits in short turns: a handler that takes a lock would hang it."""
    import subprocess
    import sys

    code = (
        "import os, signal, sys, threading\n"
        "from shared.stop_request import StopRequest\n"
        "for _ in range(300):\n"
        "    stop = StopRequest().listen()\n"
        "    threading.Timer(0.001, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        "    while not stop.wait(0.00001): pass\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
