"""Faults of a published folder. None may reach an engine."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import load_file, save_file

from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import list_versions
from shared.probe import Probe
from shared.versions import MANIFEST, Manifest, manifest_sha256, read_manifest, version_path, write_version

WEIGHTS = "model.safetensors"


def nothing(_folder: Path) -> None:
    """No change: the fault is elsewhere."""


@dataclass(frozen=True)
class FolderFault:
    """A fault of a version, and a part of the reason for its rejection."""

    name: str
    reason: str
    before: Callable[[Path], object] = nothing  # applied to the folder before its manifest is written
    after: Callable[[Path], object] = nothing
    manifest: Callable[[Manifest], dict[str, Any]] = lambda _: {}  # changed fields of the manifest


def weights(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A fault that the manifest includes: the trainer itself wrote other tensors."""

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


def add_pickle(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04N.")


def other_probe(manifest: Manifest) -> dict[str, Any]:
    """Replace the logprobs with some that no engine computes with these weights."""
    sequences = [
        msgspec.structs.replace(sequence, logprobs=[p - 1.0 for p in sequence.logprobs])
        for sequence in manifest.probe.sequences
    ]
    return {"probe": msgspec.structs.replace(manifest.probe, sequences=sequences)}


LATE = FolderFault("late", "")  # sound; see publish_copy
WRONG_PROBE = FolderFault("a wrong probe", "other logprobs", manifest=other_probe)  # only an engine detects it
FOLDER_FAULTS = [
    FolderFault("a tensor of another shape", "in version 0", before=weights(turn)),
    FolderFault("a missing tensor", "is missing", before=weights(lambda tensors: tensors.pop(max(tensors)))),
    FolderFault(
        "one more tensor",
        "'z' is not in",
        before=weights(lambda tensors: tensors.update(z=tensors[min(tensors)][:1].clone())),
    ),
    FolderFault("a flipped byte", "sha256", after=flip_byte),
    FolderFault("truncated weights", "bytes", after=truncate),
    FolderFault("a link out", "leads out of", after=link_out),
    FolderFault("an absolute name", "is no file of this folder", after=absolute_name),
    FolderFault("an unlisted pickle", "does not list", after=add_pickle),
    FolderFault("another base model", "another base model", manifest=lambda _: {"base_fingerprint": "f" * 64}),
    FolderFault("an empty probe", "its probe is empty", manifest=lambda _: {"probe": Probe("float32", [])}),
]


def publish_copy(root: Path, ledger: Ledger, of: int, fault: FolderFault, late: Path | None = None) -> int:
    """Publish a copy of a version with this fault. Returns its number.

    late: move the folder here; the test moves it back, like a folder that appears late on a slow network.
    """
    with ledger.read() as connection:
        version = max(row.version for row in list_versions(connection)) + 1
    base = root / version_path(of)
    manifest = read_manifest(base)

    def write(folder: Path) -> None:
        for name in manifest.files:
            shutil.copyfile(base / name, folder / name)
        fault.before(folder)

    about = {"version": version, "parent": of}
    write_version(root, msgspec.structs.replace(manifest, **about, **fault.manifest(manifest)), write)
    folder = root / version_path(version)
    fault.after(folder)
    digest = manifest_sha256(folder)
    if late is not None:
        shutil.move(folder, late)
    with ledger.write() as connection:
        transitions.publish(connection, **about, kind="full", step=0, manifest_sha256=digest)
    return version
