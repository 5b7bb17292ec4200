"""A version on disk: written whole or not at all, verified before it is believed.

`ROOT/versions/v000012/` holds what Hugging Face writes (config, tokenizer, safetensors) and MANIFEST.json. A folder
counts only together with its row in the ledger; one without a row is garbage from a crash. Owns the layout, the
manifest and the checks. Knows nothing of torch: whoever has the weights writes the files.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from shared.errors import VersionError

MANIFEST = "MANIFEST.json"


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a version."""

    size: int  # bytes
    sha256: str


class ProbeSequence(msgspec.Struct, frozen=True):
    """One token sequence and its logprobs.

    token_ids: [T]; logprobs: [T-1], log p(token_ids[t+1] | token_ids[..t]) at temperature 1, natural logarithm.
    """

    token_ids: list[int]
    logprobs: list[float]


class Probe(msgspec.Struct, frozen=True):
    """What an engine must reproduce after loading, before it serves under this version's name."""

    dtype: str  # the type the logprobs were computed in
    sequences: list[ProbeSequence]


class Manifest(msgspec.Struct, frozen=True):
    """MANIFEST.json."""

    version: int
    parent: int | None
    kind: str  # full | lora
    base: str  # the base model's path, as configured
    base_fingerprint: str  # of the base model's configuration and weights: see `fingerprint`
    step: int  # optimizer steps behind these weights
    created_at: float  # Unix seconds
    files: dict[str, FileEntry]
    probe: Probe


def version_name(version: int) -> str:
    return f"v{version:06d}"


def version_path(version: int) -> str:
    """Where a version lies, relative to the root folder: the same on every machine that mounts it."""
    return f"versions/{version_name(version)}"


def write_version(root: Path, manifest: Manifest, write_files: Callable[[Path], None]) -> Manifest:
    """Write a version so that it appears whole or not at all: temporary folder, fsync, rename, fsync.

    Args:
        root: the shared folder.
        manifest: everything but `files`, which this fills in.
        write_files: writes the model's files into the folder it is given.

    Returns: the manifest as written. The caller adds the version's row; until then the folder counts for nothing.
    Raises VersionError when the disk refuses.
    """
    final = root / version_path(manifest.version)
    temporary = final.with_name(f".tmp-{final.name}-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        write_files(temporary)
        files = {name: _entry(temporary / name) for name in sorted(_relative_files(temporary))}
        manifest = msgspec.structs.replace(manifest, files=files)
        (temporary / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        for file in [temporary / MANIFEST, *(temporary / name for name in files)]:
            fsync(file)
        fsync(temporary)
        if final.exists():  # a crash left it behind without its row
            shutil.rmtree(final)
        temporary.rename(final)
        fsync(final.parent)
    except OSError as exc:
        shutil.rmtree(temporary, ignore_errors=True)
        raise VersionError(
            f"version {manifest.version} cannot be written to {final.parent} ({exc.strerror}); "
            "free space there or mend its permissions"
        ) from exc
    return manifest


_SAMPLES, _SAMPLE_BYTES = 17, 64 * 1024


def read_manifest(folder: Path) -> Manifest:
    """Parse a version's manifest. Raises VersionError."""
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except OSError as exc:
        raise VersionError(f"{folder}: {MANIFEST} cannot be read ({exc.strerror})") from exc
    except msgspec.DecodeError as exc:
        raise VersionError(f"{folder}: {MANIFEST} is damaged ({exc})") from exc


def verify_version(folder: Path) -> Manifest:
    """Check every file's size and sha256 against the manifest. Raises VersionError naming the first that differs."""
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        file = folder / name
        try:
            found = _entry(file)
        except OSError as exc:
            raise VersionError(f"{folder}: {name} cannot be read ({exc.strerror})") from exc
        if found.size != entry.size:
            raise VersionError(f"{folder}: {name} has {found.size} bytes and should have {entry.size}")
        if found.sha256 != entry.sha256:
            raise VersionError(f"{folder}: {name} does not match its sha256")
    return manifest


def fingerprint(folder: Path) -> str:
    """What tells one base model from another: sha256 over config.json and, of each weight file, name, size and samples.

    Samples, because a start must not read a hundred gigabytes only to find the model it knows.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            for part in range(_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * part // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def remove_temporary_versions(root: Path) -> None:
    """Delete what writers that died left behind. Call it while no other writer is alive."""
    for folder in (root / "versions").glob(".tmp-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _relative_files(folder: Path) -> Iterator[str]:
    for file in folder.rglob("*"):
        if file.is_file():
            yield str(file.relative_to(folder))


def _entry(file: Path) -> FileEntry:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return FileEntry(size=file.stat().st_size, sha256=digest)


def fsync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
