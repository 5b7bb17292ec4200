"""What changed between two files of weights, small; and the newer file rebuilt from the older one, bit for bit.

A policy update at a small learning rate leaves nearly all bfloat16 weights as they are (arXiv 2602.03839). A delta
holds the new bits of those that changed, so that applying it overwrites and never adds: nothing is rounded and nothing
drifts. It knows no tensors. Both files have the same header, and what follows is compared as words of 16 bits, in
blocks, each on its own: so neither side needs memory for more than a block, whatever a delta says.

A delta is a safetensors file with two rows of bytes for each block that changed, both compressed by zlib:
`NUMBER.gaps`, the distances between changed words, and `NUMBER.values`, their new bits. What a distance is made of:
255 stands for 255 words that stay, any smaller byte for so many and one word that changes. Of the values all low bytes
come first, then all high bytes, because sign and exponent repeat themselves.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import struct
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from io import BufferedReader
from itertools import cycle
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.errors import VersionError
from shared.tensors import data_start, read_bytes_of

BLOCK_BYTES = 2 * 1024 * 1024
_LEVEL = 1  # of zlib: higher ones cost much more time and save little
_STAYS = 255  # in gaps: so many words stay as they are
_PART = re.compile(r"(0|[1-9][0-9]{0,8})\.(gaps|values)", re.ASCII)

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint16]


def write_delta(older: Path, newer: Path, delta: Path, max_bytes: int) -> bool:
    """Write what changed from one safetensors file to another.

    Returns False, with no file written, when the delta would have more than `max_bytes` of data or cannot be: the
    headers or the sizes differ. Raises VersionError when a file is no safetensors file, OSError when the disk refuses.
    """
    start = data_start(newer)
    if data_start(older) != start or older.stat().st_size != newer.stat().st_size:
        return False
    lengths: dict[str, int] = {}
    with older.open("rb") as before, newer.open("rb") as after, tempfile.TemporaryFile(dir=delta.parent) as data:
        if before.read(start) != after.read(start):
            return False
        for number, ((old, _), (new, _)) in enumerate(zip(_blocks(before), _blocks(after), strict=True)):
            changed = np.flatnonzero(old != new)
            if not changed.size:
                continue
            for part, raw in (("gaps", _gaps(changed)), ("values", _split(new[changed]))):
                packed = zlib.compress(raw, _LEVEL)
                lengths[f"{number}.{part}"] = len(packed)
                data.write(packed)
            if data.tell() > max_bytes:
                return False
        data.seek(0)
        with delta.open("wb") as target:
            target.write(_header(lengths))
            shutil.copyfileobj(data, target)
    return True


def rebuild(older: Path, deltas: Sequence[Path], newer: Path) -> str:
    """Write the file that deltas make of an older one, the oldest delta first.

    Returns its sha256, which the caller compares: a delta does not know what it was made against. Raises VersionError
    when a delta is damaged or does not fit the file, OSError when a file cannot be read or written.
    """
    digest = hashlib.sha256()
    with ExitStack() as stack:
        source, target = stack.enter_context(older.open("rb")), stack.enter_context(newer.open("wb"))
        patches = [_Patches(delta, stack.enter_context(delta.open("rb"))) for delta in deltas]
        header = source.read(data_start(older))
        target.write(header)
        digest.update(header)
        hasher = stack.enter_context(ThreadPoolExecutor(1))  # beside patching and writing, which take as long
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
    """Raise VersionError unless a file is a delta of one with so many bytes of data, as far as its header tells."""
    with delta.open("rb") as stream:
        patches = _Patches(delta, stream)
    for number in range(-(-data_bytes // BLOCK_BYTES)):
        patches.pop(number)
    patches.require_done()


class _Patches:
    """The changed blocks of a delta that is open."""

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
        """Overwrite what changed in a block."""
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
        """Offset and length of a block's parts, once; None: nothing in it changed."""
        return self._blocks.pop(number, None)

    def require_done(self) -> None:
        """Raise VersionError when there are blocks that the file does not have."""
        if self._blocks:
            raise self._error(f"it changes block {min(self._blocks)}, which the file does not have")

    def _unpack(self, place: tuple[int, int], most: int) -> Bytes:
        """The bytes of a part, at most so many: what does not fit is neither read nor decompressed."""
        offset, length = place
        if length > most + most // 1000 + 64:  # zlib adds no more to what it cannot compress
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
    """What follows in a file, block by block: as words, and as the bytes beneath them. Valid until the next but one."""
    for buffer in cycle((bytearray(BLOCK_BYTES), bytearray(BLOCK_BYTES))):
        length = stream.readinto(buffer)  # a buffered file fills it, but at its end
        if not length:
            return
        buffer[length : length + length % 2] = bytes(length % 2)  # half a word at the end
        yield np.frombuffer(buffer, "<u2", count=-(-length // 2)), memoryview(buffer)[:length]


def _gaps(changed: NDArray[np.int64]) -> bytes:
    """Positions of changed words, ascending, as the words that stay before each of them."""
    stay = np.diff(changed, prepend=-1) - 1
    full = stay // _STAYS
    gaps = np.full(changed.size + int(full.sum()), _STAYS, np.uint8)
    gaps[np.cumsum(full + 1) - 1] = stay % _STAYS
    return gaps.tobytes()


def _split(words: Words) -> bytes:
    """All low bytes, then all high bytes."""
    return words.astype("<u2").view(np.uint8).reshape(-1, 2).T.tobytes()


def _join(values: Bytes) -> Words:
    low, high = values.reshape(2, -1)
    joined: Words = low | np.left_shift(high, 8, dtype=np.uint16)
    return joined


def _header(lengths: dict[str, int]) -> bytes:
    entries, end = {}, 0
    for name, length in lengths.items():
        entries[name] = {"dtype": "U8", "shape": [length], "data_offsets": [end, end + length]}
        end += length
    encoded = msgspec.json.encode(entries)
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded
