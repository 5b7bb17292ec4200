"""The difference between two weights files as a small delta, and the newer file rebuilt from the older one bit for bit.

A policy update at a small learning rate leaves nearly all bfloat16 weights unchanged (arXiv 2602.03839). A delta stores
the new bits of those that changed. Applying it overwrites values and never adds: nothing is rounded, and errors do not
accumulate. It ignores tensor boundaries. Both files have the same header; the data after it are compared as words of
16 bits in independent blocks, so that neither side needs memory for more than a block, whatever a delta contains.

A delta is a safetensors file with two rows of bytes for each block that changed, both compressed by zlib:
`NUMBER.gaps`, the distances between changed words, and `NUMBER.values`, their new bits. In a distance, the byte 255
stands for 255 unchanged words; a smaller byte n stands for n unchanged words and one changed word. In the values, all
low bytes precede all high bytes, because sign and exponent repeat.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from io import BufferedReader
from itertools import cycle
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shared.errors import VersionError
from shared.tensors import Tensor, data_start, make_header, read_bytes_of

BLOCK_BYTES = 2 * 1024 * 1024
_LEVEL = 1  # of zlib: higher levels are much slower and save little
_STAYS = 255  # in gaps: this number of unchanged words
_PART = re.compile(r"(0|[1-9][0-9]{0,8})\.(gaps|values)", re.ASCII)

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint16]


def write_delta(older: Path, newer: Path, delta: Path, max_bytes: int) -> bool:
    """Write the changes from one safetensors file to another.

    Returns False, and writes no file, if the delta would have more than `max_bytes` of data, or if headers or sizes
    differ. Raises VersionError if a file is no safetensors file, OSError if the disk cannot be written.
    """
    start = data_start(newer)
    if data_start(older) != start or older.stat().st_size != newer.stat().st_size:
        return False
    layout: dict[str, Tensor] = {}
    with older.open("rb") as before, newer.open("rb") as after, tempfile.TemporaryFile(dir=delta.parent) as data:
        if before.read(start) != after.read(start):
            return False
        for number, ((old, _), (new, _)) in enumerate(zip(_blocks(before), _blocks(after), strict=True)):
            changed = np.flatnonzero(old != new)
            if not changed.size:
                continue
            for part, raw in (("gaps", _gaps(changed)), ("values", _split(new[changed]))):
                packed = zlib.compress(raw, _LEVEL)
                layout[f"{number}.{part}"] = Tensor("U8", (len(packed),))
                data.write(packed)
            if data.tell() > max_bytes:
                return False
        data.seek(0)
        with delta.open("wb") as target:
            target.write(make_header(layout))
            shutil.copyfileobj(data, target)
    return True


def rebuild(older: Path, deltas: Sequence[Path], newer: Path) -> str:
    """Apply deltas to an older file, the oldest delta first, and write the result.

    Returns its sha256 for the caller to compare: a delta does not know which file it was made from. Raises VersionError
    if a delta is damaged or does not fit the file, OSError if a file cannot be read or written.
    """
    digest = hashlib.sha256()
    with ExitStack() as stack:
        source, target = stack.enter_context(older.open("rb")), stack.enter_context(newer.open("wb"))
        patches = [_Patches(delta, stack.enter_context(delta.open("rb"))) for delta in deltas]
        header = source.read(data_start(older))
        target.write(header)
        digest.update(header)
        hasher = stack.enter_context(ThreadPoolExecutor(1))  # in parallel with patching and writing, which take as long
        hashed = hasher.submit(digest.update, b"")
        for number, (words, block) in enumerate(_blocks(source)):
            for patch in patches:
                patch.apply(number, words)
            hashed.result()
            hashed = hasher.submit(digest.update, block)
            target.write(block)
        hashed.result()
        for patch in patches:
            patch.require_done()
    return digest.hexdigest()


def require_delta(delta: Path, data_bytes: int) -> None:
    """Raise VersionError unless a file is a delta for this number of data bytes, according to its header."""
    with delta.open("rb") as stream:
        patches = _Patches(delta, stream)
    for number in range(-(-data_bytes // BLOCK_BYTES)):
        patches.pop(number)
    patches.require_done()


class _Patches:
    """The changed blocks of an open delta."""

    def __init__(self, file: Path, stream: BufferedReader) -> None:
        self._file, self._stream = file, stream
        _, parts = read_bytes_of(file)
        self._blocks: dict[int, dict[str, tuple[int, int]]] = {}
        for name, place in parts.items():
            match = _PART.fullmatch(name)
            if match is None:
                raise self._error(f"{name!a} is no part of a delta")
            self._blocks.setdefault(int(match[1]), {})[match[2]] = place
        for number, found in self._blocks.items():
            if len(found) != 2:
                raise self._error(f"block {number} has no values, or no gaps")

    def apply(self, number: int, words: Words) -> None:
        """Overwrite the changed words of a block."""
        place = self.pop(number)
        if place is None:
            return
        gaps = self._unpack(place["gaps"], words.size)
        values = self._unpack(place["values"], words.nbytes)
        ends = gaps != _STAYS
        changed = np.cumsum(gaps, dtype=np.int32)[ends]
        changed += np.arange(changed.size, dtype=np.int32)
        if not changed.size or not ends[-1] or changed[-1] >= words.size:
            raise self._error(f"block {number} changes words beyond its end")
        if values.size != 2 * changed.size:
            raise self._error(f"block {number} has {values.size} bytes for {changed.size} words of two")
        words[changed] = _join(values)

    def pop(self, number: int) -> dict[str, tuple[int, int]] | None:
        """Return offset and length of a block's parts, once; None: the block did not change."""
        return self._blocks.pop(number, None)

    def require_done(self) -> None:
        """Raise VersionError if blocks are left that the file does not have."""
        if self._blocks:
            raise self._error(f"it changes block {min(self._blocks)}, which the file does not have")

    def _unpack(self, place: tuple[int, int], most: int) -> Bytes:
        """Return the bytes of a part, up to a limit: larger parts are neither read nor decompressed."""
        offset, length = place
        if length > most + most // 1000 + 64:  # the most that zlib adds to incompressible data
            raise self._error(f"a part of {length} bytes is longer than what it may hold")
        self._stream.seek(offset)
        decompressor = zlib.decompressobj()
        try:
            raw = decompressor.decompress(self._stream.read(length), most + 1)
        except zlib.error as exc:
            raise self._error(f"a part cannot be decompressed ({exc})") from exc
        if len(raw) > most or not decompressor.eof or decompressor.unused_data:
            raise self._error("a part holds more, or less, than its block may change")
        return np.frombuffer(raw, np.uint8)

    def _error(self, reason: str) -> VersionError:
        return VersionError(f"{self._file}: is no sound delta: {reason}")


def _blocks(stream: BufferedReader) -> Iterator[tuple[Words, memoryview]]:
    """Yield a file's rest block by block: as words, and as their bytes. A block is valid until the next but one."""
    for buffer in cycle((bytearray(BLOCK_BYTES), bytearray(BLOCK_BYTES))):
        length = stream.readinto(buffer)  # a buffered file fills the buffer, except at its end
        if not length:
            return
        buffer[length : length + length % 2] = bytes(length % 2)  # pads half a word at the end
        yield np.frombuffer(buffer, "<u2", count=-(-length // 2)), memoryview(buffer)[:length]


def _gaps(changed: NDArray[np.int64]) -> bytes:
    """Encode ascending positions of changed words as the numbers of unchanged words before each."""
    stay = np.diff(changed, prepend=-1) - 1
    full = stay // _STAYS
    gaps = np.full(changed.size + int(full.sum()), _STAYS, np.uint8)
    gaps[np.cumsum(full + 1) - 1] = stay % _STAYS
    return gaps.tobytes()


def _split(words: Words) -> bytes:
    """Return all low bytes, then all high bytes."""
    return words.astype("<u2").view(np.uint8).reshape(-1, 2).T.tobytes()


def _join(values: Bytes) -> Words:
    low, high = values.reshape(2, -1)
    joined: Words = low | np.left_shift(high, 8, dtype=np.uint16)
    return joined
