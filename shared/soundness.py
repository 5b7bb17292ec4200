"""Checks a version before any engine loads it, so that no engine gets a damaged or forbidden file.

A version that is damaged, or contains forbidden files, raises VersionError. One that is not there yet raises
VersionMissing: a network folder may show a finished version later than the ledger shows its row.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from shared.adapters import require_adapter
from shared.architecture import CONFIG, read_architecture, require_same_architecture
from shared.chain import read_chain
from shared.delta import require_delta
from shared.errors import VersionError, VersionMissing
from shared.ledger.queries import VersionRow
from shared.tensors import Tensor, data_start, read_tensors, require_same_tensors
from shared.versions import MANIFEST, FileEntry, Manifest, delta_name, read_manifest, verify_version

_FOREIGN_SUFFIXES = (
    *(".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz"),  # pickles, or may contain one
    *(".h5", ".hdf5", ".msgpack", ".gguf", ".ggml", ".onnx"),
)
_ZIP, _PICKLE = b"PK\x03\x04", tuple(bytes([0x80, protocol]) for protocol in range(2, 6))


@dataclass(frozen=True)
class Base:
    """Properties of version 0 that every version must share."""

    fingerprint: str
    tensors: dict[str, Tensor]
    config: FileEntry | None  # of config.json; most versions have the same file
    architecture: dict[str, Any]


def read_base(root: Path, first: VersionRow) -> Base:
    """Read the properties of version 0 that later versions are compared with. Raises VersionError."""
    with _naming_folder(folder := _inside(root, first.path)):
        manifest = _read_listed(root, folder, first)
        config = manifest.files.get(CONFIG)
        architecture = {} if config is None else read_architecture(folder)
        return Base(manifest.base_fingerprint, read_tensors(folder), config, architecture)


def require_sound(root: Path, row: VersionRow, base: Base | None) -> Manifest:
    """Check what `require_well_formed` does, and every file's sha256. Returns the manifest. Raises the same errors."""
    require_well_formed(root, row, base)
    with _naming_folder(folder := _inside(root, row.path)):
        return verify_version(folder, row.manifest_sha256)


def require_well_formed(root: Path, row: VersionRow, base: Base | None) -> Manifest:
    """Check a version's location, manifest, files and tensors, which reads little. Returns its manifest.

    base: version 0; None: the ledger has none. Raises VersionError with the reason, VersionMissing if the version or
    a part of it is not there.
    """
    with _naming_folder(folder := _inside(root, row.path)):
        manifest = _read_listed(root, folder, row)
        tensors = read_tensors(_whole_folder(root, folder, manifest))
        if base is not None:
            if manifest.base_fingerprint != base.fingerprint:
                raise VersionError(f"{folder}: was trained from another base model than version 0")
            if manifest.kind == "lora":
                require_adapter(folder, base.tensors, base.fingerprint)
            else:
                require_same_tensors(folder, tensors, base.tensors)
                _require_same_model(folder, manifest, base)
        return manifest


def _require_same_model(folder: Path, manifest: Manifest, base: Base) -> None:
    config = manifest.files.get(CONFIG)
    if base.config in (None, config):
        return
    if config is None:
        raise VersionError(f"{folder}: {CONFIG} is missing, which version 0 has")
    require_same_architecture(folder, read_architecture(folder), base.architecture)


def _whole_folder(root: Path, folder: Path, manifest: Manifest) -> Path:
    """Return the folder with a version's tensors: its own or, for a delta, that of the whole version in its chain.

    A delta changes no header, so names, shapes and types are the same. Raises VersionError unless every delta fits.
    """
    if manifest.form == "whole":
        return folder
    whole, *changes = read_chain(root, manifest.version)
    for link in (whole, *changes):
        _require_links_inside(root, link.folder)
        _require_listed_files(link.folder, link.manifest)
    for link in changes:
        for name, entry in link.manifest.whole.items():
            require_delta(link.folder / delta_name(name), entry.size - data_start(whole.folder / name))
    return whole.folder


def is_foreign(file: Path) -> bool:
    """Whether a file contains weights in a format other than safetensors, a pickle, or an archive that may have one."""
    name = file.name.lower()
    if name.endswith(_FOREIGN_SUFFIXES):
        return True
    if name.endswith(".safetensors"):
        return False
    with file.open("rb") as stream:
        return stream.read(4).startswith((_ZIP, *_PICKLE))


@contextlib.contextmanager
def _naming_folder(folder: Path) -> Iterator[None]:
    """Convert errors of the file system to errors that name the folder."""
    try:
        yield
    except OSError as exc:
        raise VersionMissing(f"{folder}: cannot be read ({exc.strerror})") from exc
    except ValueError as exc:  # a name that no file can have
        raise VersionError(f"{folder}: holds a name that is none ({exc})") from exc


def _read_listed(root: Path, folder: Path, row: VersionRow) -> Manifest:
    """Return the manifest of a folder that contains exactly the files that it lists."""
    _require_links_inside(root, folder)
    manifest = read_manifest(folder, row.manifest_sha256)
    _require_that_row(folder, manifest, row)
    _require_listed_files(folder, manifest)
    return manifest


def _inside(root: Path, path: str) -> Path:
    """Return a version's folder, by its path in the ledger. Raises VersionError if that is outside `versions/`."""
    parts = PurePosixPath(path).parts
    if len(parts) != 2 or parts[0] != "versions" or ".." in parts or "\0" in path:
        raise VersionError(f"the ledger names the folder {path!a}, which is none in {root / 'versions'}")
    return root / path


def _require_links_inside(root: Path, folder: Path) -> None:
    """Raise VersionError if the folder, or anything in it, is a link to a place outside `versions/`."""
    home = os.path.realpath(root / "versions")
    entries = [str(folder)]
    if folder.is_dir():
        entries += [entry.path for entry in _walk(folder) if entry.is_symlink()]
    for entry in entries:
        target = os.path.realpath(entry)
        if os.path.commonpath([home, target]) != home or target == home:
            raise VersionError(f"{folder}: {os.path.relpath(entry, folder)!a} leads out of {home}, to {target!a}")


def _require_that_row(folder: Path, manifest: Manifest, row: VersionRow) -> None:
    for name, stated, known in (
        ("version", manifest.version, row.version),
        ("parent", manifest.parent, row.parent),
        ("kind", manifest.kind, row.kind),
    ):
        if stated != known:
            raise VersionError(f"{folder}: {MANIFEST} says {name} {stated!a}, and the ledger {known!a}")


def _require_listed_files(folder: Path, manifest: Manifest) -> None:
    """Raise VersionError unless the folder contains the regular files that the manifest lists, and no others."""
    present = {os.path.relpath(entry.path, folder): entry for entry in _walk(folder)}
    present.pop(MANIFEST, None)
    for name, entry in sorted(present.items()):
        if entry.is_dir(follow_symlinks=False):
            continue
        if name not in manifest.files:
            raise VersionError(f"{folder}: holds {name!a}, which {MANIFEST} does not list")
        if not entry.is_file():
            if entry.is_symlink() and not Path(entry.path).exists():
                raise VersionMissing(f"{folder}: {name!a} is a link to nothing")
            raise VersionError(f"{folder}: {name!a} is no regular file")
        if is_foreign(Path(entry.path)):
            raise VersionError(f"{folder}: {name!a} is no safetensors file, and may run code when it is loaded")
    for name in manifest.files:
        if name not in present:
            raise VersionMissing(f"{folder}: {name!a} is not there, and {MANIFEST} lists it")


def _walk(folder: Path) -> list[os.DirEntry[str]]:
    """Return everything below a folder; links to folders are not followed."""
    found, folders = [], [str(folder)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                found.append(entry)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
    return found
