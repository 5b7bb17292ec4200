"""Rows and arrays as bytes, to send them to other ranks. Without pickle: decoding only produces data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shared.experience import Experience

AnyArray = npt.NDArray[Any]


def pack_rows(rows: Sequence[Experience]) -> bytes:
    """Encode rows with their tokens."""
    return msgspec.msgpack.encode(rows, enc_hook=_encode)


def unpack_rows(data: bytes) -> list[Experience]:
    """The inverse of `pack_rows`. Raises msgspec.ValidationError for other data."""
    return _decode_rows(data)


def pack_arrays(arrays: Sequence[AnyArray]) -> bytes:
    """Encode arrays of any shape."""
    return msgspec.msgpack.encode(list(arrays), enc_hook=_encode)


def unpack_arrays(data: bytes) -> list[AnyArray]:
    """The inverse of `pack_arrays`."""
    return [_decode(np.ndarray, packed) for packed in msgspec.msgpack.decode(data)]


def _encode(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    if not isinstance(array, np.ndarray):
        raise NotImplementedError(f"a {type(array).__name__} is not sent to other ranks")
    return array.dtype.str, array.shape, array.tobytes()


def _decode(_kind: type, packed: Any) -> AnyArray:
    kind, shape, data = packed
    return np.frombuffer(data, np.dtype(kind)).reshape(shape).copy()  # writable, like those of the ledger


_decode_rows = msgspec.msgpack.Decoder(list[Experience], dec_hook=_decode).decode
