"""Versions that no engine may see: each is rejected with a reason, and the service goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import list_versions
from shared.ledger.tables import versions
from shared.probe import Probe
from shared.soundness import read_base, require_sound
from shared.versions import manifest_sha256
from tests.support.experiences import trainer_config
from tests.support.models import make_tiny_model
from tests.support.postgres import sqlite_alone
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import (
    TENSORS,
    RunningExplorer,
    publish,
    safetensors,
    served,
    wait_until,
    write_scripted_version,
)
from trainer_service.base_version import ensure_base_version
from trainer_service.models import load_causal_lm, named_weights
from trainer_service.publish import compute_probe, probe_sequences, write_full_version

database_url = sqlite_alone  # nothing here depends on the database


WEIGHTS = "model.safetensors"


def header(entries: object, data: bytes = b"") -> bytes:
    encoded = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def tensor(dtype: str = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


DEEP = b"[" * 100_000
SOUND = safetensors(TENSORS)
TURNED = safetensors({**TENSORS, "embed.weight": ("F32", [3, 2])})
RENAMED = safetensors({"embed.weight": TENSORS["embed.weight"], "tail.weight": TENSORS["head.weight"]})
HALF = safetensors({name: ("BF16", shape) for name, (_, shape) in TENSORS.items()})
FEWER = safetensors({"embed.weight": TENSORS["embed.weight"]})
REST = safetensors({"head.weight": TENSORS["head.weight"]})
MORE = safetensors({**TENSORS, "z": ("F32", [1])})
INDEX = "model.safetensors.index.json"
IN_FILES = {
    "turned": ({WEIGHTS: TURNED}, "'embed.weight' is F32 [3, 2], and F32 [2, 3] in version 0"),
    "renamed": ({WEIGHTS: RENAMED}, "'head.weight' is missing"),
    "another type": ({WEIGHTS: HALF}, "'embed.weight' is BF16"),
    "fewer": ({WEIGHTS: FEWER}, "'head.weight' is missing"),
    "more": ({WEIGHTS: MORE}, "'z' is not in version 0"),
    "twice": ({"other.safetensors": FEWER}, "'embed.weight' is in model.safetensors and in other.safetensors"),
    "hidden from engines": ({WEIGHTS: FEWER, ".rest.safetensors": REST}, "engines do not read '.rest.safetensors'"),
    "read alone": ({WEIGHTS: FEWER, "consolidated.safetensors": REST}, "do not read 'consolidated.safetensors'"),
    "truncated": ({WEIGHTS: SOUND[:-2]}, "model.safetensors"),
    "longer": ({WEIGHTS: SOUND + b"x"}, "model.safetensors"),
    "empty": ({WEIGHTS: b""}, "is no safetensors file"),
    "short": ({WEIGHTS: b"\1\0"}, "is no safetensors file"),
    "huge header": ({WEIGHTS: b"\xff" * 64}, "is no safetensors file"),
    "no json": ({WEIGHTS: header(b"{")}, "its header is damaged"),
    "deep json": ({WEIGHTS: header(DEEP)}, "its header is damaged"),
    "no table": ({WEIGHTS: header([1])}, "its header is damaged"),
    "no shape": ({WEIGHTS: header(tensor(shape="x"), bytes(4))}, "its header is damaged"),
    "negative": ({WEIGHTS: header(tensor(shape=[-1]), bytes(4))}, "its header is damaged"),
    "many dimensions": ({WEIGHTS: header(tensor(shape=[2] * 99), bytes(4))}, "not the bytes"),
    "vast": ({WEIGHTS: header(tensor(shape=[2**60] * 30), bytes(4))}, "not the bytes"),
    "beyond its end": ({WEIGHTS: header(tensor(offsets=(0, 8)), bytes(4))}, "not the bytes"),
    "a hole": ({WEIGHTS: header(tensor(offsets=(4, 8)), bytes(8))}, "not the bytes"),
    "an index of more": ({INDEX: b'{"weight_map": {"x": "y.safetensors"}}'}, "says tensor 'embed.weight' is in None"),
    "a damaged index": ({INDEX: DEEP}, "is damaged"),
    "a bin": ({"pytorch_model.bin": b"x"}, "'pytorch_model.bin' is no safetensors file"),
    "a pt": ({"a.PT": b"x"}, "'a.PT' is no safetensors file"),
    "a hidden pickle": ({"notes.txt": pickle.dumps([1])}, "'notes.txt'"),
    "a hidden archive": ({"notes.txt": b"PK\x03\x04"}, "'notes.txt' is no safetensors file"),
}


def outside(folder: Path) -> Path:
    return folder.parent.parent / "outside"


def link_out(folder: Path) -> None:
    shutil.move(folder / WEIGHTS, outside(folder))
    (folder / WEIGHTS).symlink_to(outside(folder))


def folder_is_link_out(folder: Path) -> None:
    shutil.move(folder, outside(folder).with_name(folder.name))
    folder.symlink_to(outside(folder).with_name(folder.name))


def manifest_is_link_out(folder: Path) -> None:
    manifest = outside(folder).with_name("manifest")
    shutil.move(folder / "MANIFEST.json", manifest)
    (folder / "MANIFEST.json").symlink_to(manifest)


def unlisted_folder_link(folder: Path) -> None:
    (folder / "sub").symlink_to(folder)


def pipe(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def change(**fields: object) -> Callable[[Path], None]:
    def change_manifest(folder: Path) -> None:
        file = folder / "MANIFEST.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return change_manifest


def rewrite(data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "MANIFEST.json").write_bytes(data) and None


ENTRY = {"size": 1, "sha256": "0" * 64}
SHORT = {"token_ids": [5, 6], "logprobs": [-1.0]}
LONG = {"token_ids": [1] * 20_000, "logprobs": [0.0] * 19_999}
IN_FOLDER = {
    "a link out": (link_out, "leads out of"),
    "a folder that is a link out": (folder_is_link_out, "leads out of"),
    "a manifest that is a link out": (manifest_is_link_out, "leads out of"),
    "an unlisted link": (unlisted_folder_link, "'sub', which MANIFEST.json does not list"),
    "an unlisted file": (lambda folder: (folder / "more.safetensors").write_bytes(SOUND), "'more.safetensors', which"),
    "a pipe": (pipe, "is no regular file"),
    "an absolute name": (change(files={"/etc/hostname": ENTRY}), "'/etc/hostname' is no file of this folder"),
    "a name above": (change(files={"../../x": ENTRY}), "'../../x' is no file of this folder"),
    "no name": (change(files={"": ENTRY}), "'' is no file of this folder"),
    "half a character": (rewrite(b'{"files": {"\\ud800": {}}}'), "is damaged"),
    "another version": (change(version=1), "says version 1"),
    "another parent": (change(parent=7), "says parent 7"),
    "another kind": (change(kind="other"), "says kind 'other'"),
    "an adapter of nothing": (change(kind="lora"), "does not say of which earlier version"),
    "a base of its own": (change(base_version=0), "names a base as an adapter does"),
    "another base": (change(base_fingerprint="f"), "another base model"),
    "a version without end": (rewrite(b'{"version": ' + b"9" * 9999 + b"}"), "is damaged"),
    "a deep manifest": (rewrite(DEEP), "is damaged"),
    "a huge manifest": (rewrite(b" " * 5_000_000), "is no regular file of at most"),
    "wrong types": (rewrite(b"[]"), "is damaged"),
    "a long probe": (change(probe={"dtype": "float32", "sequences": [LONG]}), "its probe has more than"),
    "a type that is none": (change(probe={"dtype": "\0", "sequences": [SHORT]}), "is of the type '\\x00'"),
    "no probe": (change(probe={"dtype": "float32", "sequences": []}), "its probe is empty"),
}


def in_service(explorer: RunningExplorer) -> None:
    publish(explorer, 0)
    publish(explorer, 1)
    wait_until(lambda: served(explorer) == "1")


def publish_as_it_is(explorer: RunningExplorer, version: int = 2) -> None:
    with explorer.ledger.write() as connection:
        transitions.publish(
            connection, version=version, parent=version - 1 if version else None, kind="full", step=version
        )


def reason(explorer: RunningExplorer, version: int = 2) -> str:
    """Why the version is rejected, once it is."""

    def row():
        with explorer.ledger.read() as connection:
            return next(row for row in list_versions(connection) if row.version == version)

    wait_until(lambda: row().state == "REJECTED")
    return str(row().reason)


def assert_loaded_only(engine: ScriptedEngine, *good: int) -> None:
    """No other version ever reached the engine, not even for a moment."""
    loads = {call for call in engine.script.calls if "reload" in call}
    assert loads <= {f"reload v{version:06d}" for version in good}, loads


def test_weights_that_are_not_those_of_version_0_reach_no_engine(explorer, scripted_engine):
    in_service(explorer)
    for version, (name, (files, expected)) in enumerate(IN_FILES.items(), start=2):
        write_scripted_version(explorer.config.root, version, -1.0, files)
        publish_as_it_is(explorer, version)
        assert expected in reason(explorer, version), name
        assert served(explorer) == "1"
    assert_loaded_only(scripted_engine, 0, 1)


TINY = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 3, "num_attention_heads": 3}
CONFIGS = {
    "another architecture": (
        {**TINY, "architectures": ["Qwen2ForCausalLM"]},
        "says architectures ['Qwen2ForCausalLM']",
    ),
    "another type": ({**TINY, "model_type": "qwen2"}, "says model_type 'qwen2', and 'llama' in version 0"),
    "no architecture": ({"model_type": "llama"}, "says architectures None"),
    "another hidden size": ({**TINY, "hidden_size": 4}, "says hidden_size 4, and 3 in version 0"),
    "other heads": ({**TINY, "num_attention_heads": 1}, "says num_attention_heads 1, and 3 in version 0"),
    "no object": ([], "config.json is damaged"),
    "a deep one": (DEEP, "config.json is damaged"),
    "no text": (b'"\xff"', "config.json is damaged"),
    "a huge one": (b" " * 5_000_000, "config.json has more than"),
    "none": (None, "config.json is missing, which version 0 has"),
}


def test_a_version_whose_config_says_another_model_reaches_no_engine(explorer, scripted_engine):
    def publish_with(version: int, config: object) -> None:
        encoded = config if isinstance(config, bytes) else json.dumps(config).encode()
        files = {} if config is None else {"config.json": encoded}
        write_scripted_version(explorer.config.root, version, -1.0, files)
        publish_as_it_is(explorer, version)

    publish_with(0, TINY)
    publish_with(1, {**TINY, "transformers_version": "9.9", "vocab_size": 5})
    wait_until(lambda: served(explorer) == "1")
    for version, (name, (config, expected)) in enumerate(CONFIGS.items(), start=2):
        publish_with(version, config)
        assert expected in reason(explorer, version), name
        assert served(explorer) == "1"
    assert_loaded_only(scripted_engine, 0, 1)


def test_a_folder_or_a_manifest_that_is_not_what_it_says_reaches_no_engine(explorer, scripted_engine):
    in_service(explorer)
    for version, (name, (damage, expected)) in enumerate(IN_FOLDER.items(), start=2):
        damage(write_scripted_version(explorer.config.root, version, -1.0))
        publish_as_it_is(explorer, version)
        assert expected in reason(explorer, version), name
        assert served(explorer) == "1"
    assert_loaded_only(scripted_engine, 0, 1)


def test_a_version_that_was_exchanged_for_another_whole_one_is_refused(explorer):
    in_service(explorer)
    folder = write_scripted_version(explorer.config.root, 2, -1.0)
    digest = manifest_sha256(folder)
    shutil.rmtree(folder)
    write_scripted_version(explorer.config.root, 2, -2.0)
    with explorer.ledger.write() as connection:
        transitions.publish(connection, version=2, parent=1, kind="full", step=2, manifest_sha256=digest)
    assert "is not the one that was published" in reason(explorer)


@pytest.mark.parametrize("path", ["/etc", "../outside", "versions/../../outside", "versions", "v000002", "versions/\0"])
def test_a_path_that_leads_out_of_the_versions_is_not_followed(path, explorer):
    in_service(explorer)
    folder = write_scripted_version(explorer.config.root, 2, -1.0)
    shutil.copytree(folder, explorer.config.root.parent / "outside", dirs_exist_ok=True)
    with explorer.ledger.write() as connection:
        transitions.publish(connection, version=2, parent=1, kind="full", step=2)
        connection.execute(versions.update().where(versions.c.version == 2).values(path=path))
    assert "the ledger names the folder" in reason(explorer)
    assert served(explorer) == "1"


def test_what_the_trainer_publishes_is_sound_whatever_lies_beside_its_base_model(tmp_path):
    model = make_tiny_model(tmp_path / "base", tied=True, dtype="bfloat16")
    for name, data in {"training_args.bin": b"x", "a.onnx": b"x", "notes.txt": pickle.dumps([1])}.items():
        (model / name).write_bytes(data)
    config = trainer_config(tmp_path / "data", model)
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger:
        ensure_base_version(config, ledger)
        with ledger.read() as connection:
            (row,) = list_versions(connection)
    folder = config.root / row.path
    assert row.manifest_sha256 == manifest_sha256(folder)
    assert row.bytes == sum(file.stat().st_size for file in folder.iterdir() if file.name != "MANIFEST.json")
    base = read_base(config.root, row)
    assert require_sound(config.root, row, None).files
    assert '"dtype": "bfloat16"' in (folder / "config.json").read_text(), "the engine goes by it"
    policy = load_causal_lm(config.root / row.path)
    weights = named_weights(policy)
    probe = Probe("bfloat16", compute_probe(policy, probe_sequences(config.root)))
    write_full_version(config.root, weights.__getitem__, probe, version=1, parent=0, step=1)
    later = dataclasses.replace(row, version=1, parent=0, path="versions/v000001", manifest_sha256=None)
    assert require_sound(config.root, later, base).version == 1
