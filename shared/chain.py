"""The chain from a whole version through deltas to another version, and whole copies that are built from it.

A delta applies to the files of its parent, and names the parent's manifest by its sha256. It can be used only if the
last whole version before it and every delta since are present.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shared.delta import rebuild
from shared.errors import VersionError, VersionMissing
from shared.versions import (
    MANIFEST,
    FileEntry,
    Manifest,
    delta_name,
    file_entry,
    manifest_sha256,
    read_manifest,
    version_path,
)

MOST_DELTAS = 256  # longest chain
_COPY_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Link:
    """One version in a chain."""

    folder: Path
    manifest: Manifest
    sha256: str  # of its MANIFEST.json


def read_chain(root: Path, version: int, sha256: str | None = None) -> list[Link]:
    """Return the versions that a version is built from, from the whole one to the version itself.

    sha256: of the version's manifest; None: any. Raises VersionError if one of them is not the version that its delta
    was made from, VersionMissing if one is not there.
    """
    links = [_read_link(root, version, sha256)]
    while (of := links[0].manifest.of) is not None:
        if len(links) > MOST_DELTAS:
            raise VersionError(f"{links[-1].folder}: is made of more than {MOST_DELTAS} deltas")
        links.insert(0, _read_link(root, of.version, of.manifest_sha256))
    sizes = [{name: entry.size for name, entry in link.manifest.weights.items()} for link in links]
    for link, size in zip(links, sizes, strict=True):
        if size != sizes[0]:
            raise VersionError(f"{link.folder}: has weights of other sizes than {links[0].folder}, which it changes")
    return links


def copy_version(chain: list[Link], target: Path, bases: Mapping[str, Path] | None = None) -> Manifest:
    """Write the last version of a chain as a whole version into an empty folder, and check the sha256 of each file.

    bases: folders of whole copies, by the sha256 of the published manifest; the newest one in the chain is the starting
    point. Returns the manifest of the copy. Raises VersionError if the files do not produce that version,
    VersionMissing if a part is not there, OSError if a disk cannot be read or written.
    """
    bases = bases or {}
    folder, manifest = chain[-1].folder, chain[-1].manifest
    deltas = {delta_name(name) for name in manifest.whole}
    files = {name: entry for name, entry in manifest.files.items() if name not in deltas}
    for name, entry in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        _require(folder, name, entry, _copy(_present(folder, name), target / name))
    start = max((place for place, link in enumerate(chain) if link.sha256 in bases), default=0)
    older = bases.get(chain[start].sha256, chain[start].folder)
    for link in chain[start + 1 :]:
        for name in link.manifest.whole:
            delta = _present(link.folder, delta_name(name))
            _require(link.folder, delta_name(name), link.manifest.files[delta_name(name)], file_entry(delta).sha256)
    for name, entry in manifest.whole.items():
        changes = [link.folder / delta_name(name) for link in chain[start + 1 :]]
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        _require(folder, name, entry, rebuild(_present(older, name), changes, target / name))
    copied = msgspec.structs.replace(manifest, files={**files, **manifest.whole}, form="whole", of=None, whole={})
    (target / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(copied), indent=1))
    return copied


def _read_link(root: Path, version: int, sha256: str | None) -> Link:
    folder = root / version_path(version)
    manifest = read_manifest(folder, sha256)
    if manifest.version != version:
        raise VersionError(f"{folder}: {MANIFEST} says version {manifest.version}")
    return Link(folder, manifest, sha256 or manifest_sha256(folder))


def _present(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise VersionMissing(f"{folder}: {name!a} is not there, and {MANIFEST} lists it")
    return folder / name


def _require(folder: Path, name: str, entry: FileEntry, sha256: str) -> None:
    if sha256 != entry.sha256:
        raise VersionError(f"{folder}: {name!a} does not match its sha256")


def _copy(source: Path, target: Path) -> str:
    """Copy a file. Returns its sha256."""
    digest = hashlib.sha256()
    with source.open("rb") as reader, target.open("wb") as writer:
        while data := reader.read(_COPY_BYTES):
            digest.update(data)
            writer.write(data)
    return digest.hexdigest()
