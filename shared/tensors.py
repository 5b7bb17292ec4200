"""The tensors of a folder: names, shapes and types according to its safetensors files.

Reads and writes only the headers, so that versions of any size are compared in milliseconds and without torch. Headers
are checked before they are used: engines read the same files without checks.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from shared.errors import VersionError

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 32 * 1024 * 1024
_MOST_DIMENSIONS = 32
_NOT_READ = (".", "consolidated")  # vLLM passes over hidden files, and reads those of Mistral's own format alone
_BITS = {
    "BOOL": 8,
    **{f"{kind}{bits}": bits for kind in "UI" for bits in (8, 16, 32, 64)},
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8},
    **{"F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64},
}

T = TypeVar("T")
_Size = Annotated[int, msgspec.Meta(ge=0)]


class Tensor(NamedTuple):
    """The type and shape of a tensor."""

    dtype: str  # in safetensors' notation, e.g. BF16
    shape: tuple[int, ...]

    @property
    def data_bytes(self) -> int:
        """Size of its data. Raises KeyError for an unknown type."""
        return math.prod(self.shape) * _BITS[self.dtype] // 8

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[_Size]
    data_offsets: tuple[_Size, _Size]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_ENTRY = msgspec.json.Decoder(_Entry)
_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_INDEX = msgspec.json.Decoder(_Index)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors that an engine finds in a folder, by name. Raises VersionError with the file.

    As in the engines, only files at the top of the folder count. If there is an index, it must name each tensor's file.
    """
    found: dict[str, Tensor] = {}
    file_of: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        if file.name.startswith(_NOT_READ):
            raise VersionError(f"{folder}: engines do not read {file.name!a} together with the other files")
        for name, tensor in read_header(file).items():
            if name in found:
                raise VersionError(f"{folder}: tensor {name!a} is in {file_of[name]} and in {file.name}")
            found[name], file_of[name] = tensor, file.name
    if not found:
        raise VersionError(f"{folder}: holds no tensor in any *.safetensors file")
    index = folder / INDEX
    if index.exists():
        named = _decode(_read(index, 0, MAX_HEADER_BYTES), _INDEX, index).weight_map
        for name in sorted(named.keys() | file_of.keys()):
            if named.get(name) != file_of.get(name):
                raise VersionError(
                    f"{index}: says tensor {name!a} is in {named.get(name)!a}, and it is not there alone"
                )
    return found


def read_header(file: Path) -> dict[str, Tensor]:
    """Return a safetensors file's tensors, in the order of their data.

    Raises VersionError if the header is damaged or does not fit the size.
    """
    return {name: Tensor(entry.dtype, tuple(entry.shape)) for name, entry in _read_entries(file)[1].items()}


def read_bytes_of(file: Path) -> tuple[int, dict[str, tuple[int, int]]]:
    """Return the start of a safetensors file's data, and offset and length of each tensor of bytes in the file.

    Raises VersionError if its header is damaged or does not fit its size, or a tensor is no row of bytes.
    """
    start, entries = _read_entries(file)
    for name, entry in entries.items():
        if entry.dtype != "U8" or len(entry.shape) != 1:
            raise VersionError(f"{file}: {name!a} is {entry.dtype} {entry.shape}, and should be a row of bytes")
    return start, {name: (start + entry.data_offsets[0], entry.shape[0]) for name, entry in entries.items()}


def make_header(layout: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header of a file that contains these tensors in this order."""
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, tensor in layout.items():
        begin, end = end, end + tensor.data_bytes
        entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (begin, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def data_start(file: Path) -> int:
    """Return the offset of a safetensors file's data, after the header. Raises VersionError if that does not fit."""
    return 8 + _header_length(file)


def _header_length(file: Path) -> int:
    size = file.stat().st_size
    prefix = _read(file, 0, 8)
    length = int(struct.unpack("<Q", prefix)[0]) if len(prefix) == 8 else size
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise VersionError(f"{file}: is no safetensors file, or truncated: its header would have {length} bytes")
    return length


def _read_entries(file: Path) -> tuple[int, dict[str, _Entry]]:
    """Return the offset of the data, and the header's entries in the order of their data, which they must cover."""
    size, length = file.stat().st_size, _header_length(file)
    entries = _decode(_read(file, 8, length), _HEADER, file)
    entries.pop("__metadata__", None)
    parsed = {name: _decode(raw, _ENTRY, file) for name, raw in entries.items()}
    parsed = dict(sorted(parsed.items(), key=lambda item: item[1].data_offsets))
    end = 0
    for name, entry in parsed.items():
        begin, stop = entry.data_offsets
        if begin != end or stop < begin or stop - begin != _bytes(entry, stop - begin):
            raise VersionError(f"{file}: tensor {name!a} ({entry.dtype!a}) has not the bytes that its shape needs")
        end = stop
    if end != size - 8 - length:
        raise VersionError(f"{file}: its tensors have {end} bytes, and the file has {size - 8 - length} for them")
    return 8 + length, parsed


def require_same_tensors(folder: Path, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise VersionError with the first tensor that is missing, superfluous, or of another shape or type."""
    for name in sorted(found.keys() | expected.keys()):
        if name not in found:
            raise VersionError(f"{folder}: tensor {name!a} is missing, which version 0 has")
        if name not in expected:
            raise VersionError(f"{folder}: tensor {name!a} is not in version 0")
        if found[name] != expected[name]:
            raise VersionError(f"{folder}: tensor {name!a} is {found[name]}, and {expected[name]} in version 0")


def _bytes(entry: _Entry, unknown: int) -> int:
    """Return how many bytes the tensor needs; for an unknown type, as many as it has."""
    bits = _BITS.get(entry.dtype)
    if bits is None:
        return unknown
    if len(entry.shape) > _MOST_DIMENSIONS:
        return -1
    return math.prod(entry.shape) * bits // 8


def _read(file: Path, start: int, length: int) -> bytes:
    with file.open("rb") as stream:
        stream.seek(start)
        return stream.read(length)


def _decode(data: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T], file: Path) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise VersionError(f"{file}: its header is damaged ({exc})") from exc
