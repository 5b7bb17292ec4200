"""Faults of a published folder, each found before the real engine is asked to load it, with streams in flight."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from shared.ledger import transitions
from shared.ledger.queries import list_versions
from shared.versions import MANIFEST, Manifest, Probe, manifest_sha256, read_manifest, version_path, write_version
from tests.e2e.conftest import Live
from tests.e2e.test_5_reload import Streams, label, serving
from tests.support.processes import wait_for

pytestmark = pytest.mark.engine
WEIGHTS = "model.safetensors"
AT_ONCE = 3  # faults while the same streams are in flight


def weights(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """A fault that the manifest knows of: the trainer itself wrote other tensors."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return damage


def turn(tensors: dict[str, Any]) -> None:
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2 and tensor.shape[0] != tensor.shape[1])
    tensors[name] = tensors[name].T.contiguous()


def flip_byte(folder: Path) -> None:
    with (folder / WEIGHTS).open("r+b") as file:
        file.seek(-5, 2)
        byte = file.read(1)
        file.seek(-5, 2)
        file.write(bytes([byte[0] ^ 1]))


def truncate(folder: Path) -> None:
    with (folder / WEIGHTS).open("r+b") as file:
        file.truncate((folder / WEIGHTS).stat().st_size - 8)


def link_out(folder: Path) -> None:
    outside = folder.parent.parent / f"outside-{folder.name}"
    shutil.move(folder / WEIGHTS, outside)
    (folder / WEIGHTS).symlink_to(outside)


def absolute_name(folder: Path) -> None:
    file = folder / MANIFEST
    file.write_text(file.read_text().replace(f'"{WEIGHTS}"', '"/etc/hostname"'))


def nothing(_folder: Path) -> None:
    """The fault is one of the manifest."""


WRITTEN = {
    "a tensor of another shape": (weights(turn), "in version 0"),
    "a missing tensor": (weights(lambda tensors: tensors.pop(sorted(tensors)[-1])), "is missing"),
    "one more tensor": (weights(lambda tensors: tensors.update(z=tensors[min(tensors)][:1].clone())), "'z' is not in"),
}
BROKEN_AFTERWARDS = {
    "a flipped byte": (flip_byte, "sha256"),
    "truncated weights": (truncate, "bytes"),
    "a link out": (link_out, "leads out of"),
    "an absolute name": (absolute_name, "is no file of this folder"),
    "an unlisted pickle": (lambda folder: (folder / "pytorch_model.bin").write_bytes(b"\x80\x04N."), "does not list"),
}
IN_MANIFEST = {
    "another base model": ({"base_fingerprint": "f" * 64}, "another base model"),
    "an empty probe": ({"probe": Probe(dtype="float32", sequences=[])}, "its probe is empty"),
}
FAULTS = [
    *((name, damage, nothing, {}, expected) for name, (damage, expected) in WRITTEN.items()),
    *((name, nothing, damage, {}, expected) for name, (damage, expected) in BROKEN_AFTERWARDS.items()),
    *((name, nothing, nothing, fields, expected) for name, (fields, expected) in IN_MANIFEST.items()),
]


def publish(live: Live, ledger: Any, before: Callable[[Path], None], after: Callable[[Path], None], fields: Any) -> int:
    """A version with the weights of the one that serves. before, after: what is damaged as its manifest is written."""
    base = live.config.root / version_path(serving(live))
    with ledger.read() as connection:
        version = max(row.version for row in list_versions(connection)) + 1
    manifest: Manifest = read_manifest(base)

    def write(folder: Path) -> None:
        for name in manifest.files:
            shutil.copyfile(base / name, folder / name)
        before(folder)

    about = {"version": version, "parent": manifest.version}
    write_version(live.config.root, msgspec.structs.replace(manifest, **about, **fields), write)
    folder = live.config.root / version_path(version)
    after(folder)
    with ledger.write() as connection:
        transitions.publish(connection, **about, kind="full", step=0, manifest_sha256=manifest_sha256(folder))
    return version


def test_a_fault_of_a_folder_reaches_neither_the_engine_nor_a_stream(live, ledger):
    live.learn(8)
    good, held = serving(live), label(live)
    for first in range(0, len(FAULTS), AT_ONCE):
        with Streams(live) as chats:
            for name, before, after, fields, expected in FAULTS[first : first + AT_ONCE]:
                version = publish(live, ledger, before, after, fields)
                row = wait_for(lambda version=version: _judged(ledger, version), f"a verdict of {name}", 60)
                assert row.state == "REJECTED" and expected in row.reason, (name, row.reason)
                assert serving(live) == good and label(live) == held, name
        assert set(chats.ends.values()) == {"data: [DONE]"}
    assert live.http.get("/ready").status_code == 200
    assert live.learn(8) > version, "and training goes on"


def _judged(ledger: Any, version: int) -> Any:
    with ledger.read() as connection:
        row = next(row for row in list_versions(connection) if row.version == version)
    return row if row.state not in ("RESERVED", "PUBLISHED") else None
