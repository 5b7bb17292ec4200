"""A version on disk: written atomically, and verified before use.

`ROOT/versions/v000012/` contains what Hugging Face writes (config, tokenizer, safetensors) and MANIFEST.json. A folder
is a version only together with its row in the ledger; one without a row is garbage from a crash. Owns the layout, the
manifest and the checks. Does not use torch: the caller writes the weights. A version of the form `delta` contains the
changes to its parent's weights instead of weights: see shared/chain.py. A version of the kind `lora` contains only an
adapter: see shared/adapters.py.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec

from shared.adapters import contradiction_of_kind
from shared.errors import DiskFull, VersionError, VersionExchanged, VersionMissing, is_full
from shared.probe import Probe

MANIFEST = "MANIFEST.json"
WEIGHTS_SUFFIX = ".safetensors"
_LARGEST_TOKEN_ID = 2**31 - 1
_MOST_PROBE_TOKENS = 16_384
_IS_TYPE = re.compile(r"[a-z0-9_]{1,20}", re.ASCII)
MAX_MANIFEST_BYTES = 4 * 1024 * 1024


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a version."""

    size: int  # bytes
    sha256: str


class DeltaOf(msgspec.Struct, frozen=True):
    """The version whose weights a delta changes."""

    version: int
    manifest_sha256: str  # of its MANIFEST.json


class Manifest(msgspec.Struct, frozen=True):
    """MANIFEST.json."""

    version: int
    parent: int | None
    kind: str  # full: all weights; lora: an adapter
    base: str  # the base model's path, as configured
    base_fingerprint: str  # of the base model's configuration and weights: see `fingerprint`
    step: int  # number of updates in these weights
    created_at: float  # Unix seconds
    files: dict[str, FileEntry]
    probe: Probe
    form: Literal["whole", "delta"] = "whole"
    of: DeltaOf | None = None  # for a delta: always the parent
    whole: dict[str, FileEntry] = {}  # for a delta: the weights files that are rebuilt from it
    base_version: int | None = None  # for an adapter: the version whose weights it adapts

    @property
    def weights(self) -> dict[str, FileEntry]:
        """The weights files, as an engine loads them."""
        if self.form == "delta":
            return self.whole
        return {name: entry for name, entry in self.files.items() if name.endswith(WEIGHTS_SUFFIX)}


def delta_name(name: str) -> str:
    """Return the name of the file with the changes to a weights file."""
    return name.removesuffix(WEIGHTS_SUFFIX) + ".delta" + WEIGHTS_SUFFIX


LARGEST_VERSION = 2**31 - 1  # of the ledger's column


def version_name(version: int) -> str:
    return f"v{version:06d}"


def version_path(version: int) -> str:
    """Return the folder of a version relative to the root folder, which is the same on every machine."""
    return f"versions/{version_name(version)}"


def write_version(
    root: Path,
    manifest: Manifest,
    write_files: Callable[[Path], None],
    shrink: Callable[[Path, Manifest], Manifest] | None = None,
) -> Manifest:
    """Write a version atomically: temporary folder, fsync, rename, fsync.

    Args:
        root: the shared folder.
        manifest: everything but `files`, which this fills in.
        write_files: writes the model's files into a given folder.
        shrink: may replace the weights there by a delta, and returns the manifest for the result.

    Returns: the manifest as written. The caller adds the version's row; until then the folder is no version.
    Raises DiskFull, or VersionError if the disk or `write_files` fails; then no files remain.
    """
    final = root / version_path(manifest.version)
    temporary = final.with_name(f".tmp-{final.name}-{os.getpid()}")
    try:
        if final.exists():  # left by a crash, without its row
            shutil.rmtree(final)
        temporary.mkdir(parents=True)
        write_files(temporary)
        manifest = manifest if shrink is None else shrink(temporary, manifest)
        files = {name: file_entry(temporary / name) for name in sorted(_relative_files(temporary))}
        manifest = msgspec.structs.replace(manifest, files=files)
        (temporary / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        for file in [temporary / MANIFEST, *(temporary / name for name in files)]:
            fsync(file)
        for folder in {(temporary / name).parent for name in (MANIFEST, *files)}:
            fsync(folder)
        temporary.rename(final)
        fsync(final.parent)
    except VersionError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    except OSError as exc:
        shutil.rmtree(temporary, ignore_errors=True)
        kind = DiskFull if is_full(exc) else VersionError
        raise kind(
            f"version {manifest.version} cannot be written to {final.parent} ({exc.strerror}); "
            "free space there or correct its permissions"
        ) from exc
    return manifest


_SAMPLES, _SAMPLE_BYTES = 17, 64 * 1024
_decode_manifest = msgspec.json.Decoder(Manifest).decode


def read_manifest(folder: Path, sha256: str | None = None) -> Manifest:
    """Parse a version's manifest, and check what its types do not. Raises VersionError, or VersionMissing.

    sha256: of the manifest in the ledger; another one raises VersionExchanged. None: the version was published before
    the ledger stored it.
    """
    file = folder / MANIFEST
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_MANIFEST_BYTES:
            raise VersionError(f"{folder}: {MANIFEST} is no regular file of at most {MAX_MANIFEST_BYTES} bytes")
        encoded = file.read_bytes()
        if sha256 is not None and (digest := hashlib.sha256(encoded).hexdigest()) != sha256:
            other = f"{MANIFEST} is not the one that was published"
            raise VersionExchanged(f"{folder}: {other} (its sha256 is {digest[:12]}…)")
        manifest = _decode_manifest(encoded)
    except OSError as exc:
        raise VersionMissing(f"{folder}: {MANIFEST} cannot be read ({exc.strerror})") from exc
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise VersionError(f"{folder}: {MANIFEST} is damaged ({exc})") from exc
    if reason := _contradiction(manifest) or contradiction_of_kind(manifest):
        raise VersionError(f"{folder}: {MANIFEST} is damaged ({reason})")
    return manifest


def _contradiction(manifest: Manifest) -> str | None:
    """Return a contradiction in a manifest; None: there is none."""
    if not manifest.probe.sequences:
        return "its probe is empty, so that no engine can prove to serve it"
    probe = manifest.probe
    for dtype in (probe.dtype, probe.arithmetic):
        if not _IS_TYPE.fullmatch(dtype):  # the ledger is asked for it
            return f"its probe is of the type {dtype!a:.60}"
    if sum(map(len, probe.asked)) > _MOST_PROBE_TOKENS:
        return f"its probe has more than {_MOST_PROBE_TOKENS} tokens"
    for number, sequence in enumerate(probe.sequences):
        tokens, logprobs = len(sequence.token_ids), len(sequence.logprobs)
        if tokens < 2 or logprobs != tokens - 1:
            return f"probe {number} has {logprobs} logprobs for {tokens} tokens, and should have one less"
    if any(len(contrast.token_ids) < 2 for contrast in probe.contrasts):
        return "a contrast of its probe has less than two tokens"
    for number, token_ids in enumerate(probe.asked):
        if min(token_ids) < 0 or max(token_ids) > _LARGEST_TOKEN_ID:
            return f"probe {number} holds a number that is no token id"
    for name in (*manifest.files, *manifest.whole):
        if not _is_plain_name(name):
            return f"{name!a} is no file of this folder"
    return _contradiction_of_form(manifest)


def _contradiction_of_form(manifest: Manifest) -> str | None:
    """Return a contradiction in its form. A delta applies to an earlier version, so that every chain ends."""
    if manifest.form == "whole":
        return "it is whole, and says what it is a delta of" if manifest.of or manifest.whole else None
    if manifest.of is None or manifest.of.version != manifest.parent or manifest.of.version >= manifest.version:
        return "it is a delta, and not of its parent"
    present = {name for name in manifest.files if name.endswith(WEIGHTS_SUFFIX)}
    if not present or present != {delta_name(name) for name in manifest.whole}:
        return f"it is a delta with the files {sorted(present)}, for the weights {sorted(manifest.whole)}"
    return None


def _is_plain_name(name: str) -> bool:
    """Whether a manifest's name is that of a file in the folder, in normal form."""
    path = PurePosixPath(name)
    spelled = str(path) == name and bool(path.parts) and not path.is_absolute() and ".." not in path.parts
    return spelled and name != MANIFEST and "\0" not in name


def verify_version(folder: Path, sha256: str | None = None) -> Manifest:
    """Check every file's size and sha256 against the manifest. Raises VersionError with the first that differs.

    sha256: see `read_manifest`.
    """
    manifest = read_manifest(folder, sha256)
    for name, entry in manifest.files.items():
        file = folder / name
        try:
            found = file_entry(file)
        except OSError as exc:
            raise VersionMissing(f"{folder}: {name!a} cannot be read ({exc.strerror})") from exc
        if found.size != entry.size:
            raise VersionError(f"{folder}: {name!a} has {found.size} bytes and should have {entry.size}")
        if found.sha256 != entry.sha256:
            raise VersionError(f"{folder}: {name!a} does not match its sha256")
    return manifest


def manifest_sha256(folder: Path) -> str:
    """Return the digest of a version's manifest, which the ledger stores."""
    return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()


def version_label(version: int, folder: Path) -> str:
    """Return the label that an engine reports of its weights, such as `13:9f86d081884c7d65`: number and manifest.

    Raises VersionMissing.
    """
    try:
        return f"{version}:{manifest_sha256(folder)[:16]}"
    except OSError as exc:
        raise VersionMissing(f"{folder}: {MANIFEST} cannot be read ({exc.strerror})") from exc


def fingerprint(folder: Path) -> str:
    """Identify a base model: sha256 over config.json and, of each weights file, name, size and samples.

    Samples suffice: a start must not read a hundred gigabytes only to recognize its model.
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


def temporary_versions(root: Path) -> list[Path]:
    """Return the temporary folders of writers, dead or active."""
    return list((root / "versions").glob(".tmp-*"))


def remove_temporary_versions(folders: Iterable[Path], keep: Collection[int] = ()) -> None:
    """Delete the folders of dead writers. keep: numbers that writers may be writing."""
    kept = tuple(f".tmp-{version_name(version)}-" for version in keep)
    for folder in folders:
        if not folder.name.startswith(kept):
            shutil.rmtree(folder, ignore_errors=True)


def _relative_files(folder: Path) -> Iterator[str]:
    for file in folder.rglob("*"):
        if file.is_file():
            yield str(file.relative_to(folder))


def file_entry(file: Path) -> FileEntry:
    """Return a file's entry in a manifest."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return FileEntry(size=file.stat().st_size, sha256=digest)


def fsync(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
