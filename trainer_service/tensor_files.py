"""Writes and reads safetensors files one tensor at a time, so that no more than one is in memory.

A file's header precedes its data, so all names, types and shapes are known before the first tensor is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import torch

from shared.errors import VersionError
from shared.tensors import Tensor, data_start, read_header

PYTORCH = {"format": "pt"}  # metadata in the header of a file that PyTorch may read
TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
_NAMES = {dtype: name for name, dtype in TYPES.items()}


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype in safetensors."""
    return _NAMES[dtype]


def copy_header(file: Path) -> tuple[bytes, dict[str, Tensor]]:
    """Return a file's header unchanged, and its entry for each tensor, in the order of their data. Raises VersionError.

    Files with a copied header are equal byte for byte, except for the data.
    """
    layout = read_header(file)
    with file.open("rb") as stream:
        return stream.read(data_start(file)), layout


def write_tensors(file: Path, header: bytes, layout: Mapping[str, Tensor], read: Callable[[str], torch.Tensor]) -> None:
    """Write the file. read: returns a tensor by name, on any device; it is converted to the type in the header.

    Raises VersionError for a tensor of another shape, OSError if the file cannot be written.
    """
    with file.open("wb") as stream:
        stream.write(header)
        for name, expected in layout.items():
            _write(stream, name, read(name).detach(), expected)  # freed before the next one is read


def _write(stream: IO[bytes], name: str, tensor: torch.Tensor, expected: Tensor) -> None:
    if tuple(tensor.shape) != expected.shape:
        raise VersionError(f"{stream.name}: tensor {name!a} has shape {list(tensor.shape)}, but should be {expected}")
    tensor = tensor.to(TYPES[expected.dtype]).cpu().contiguous().flatten()
    stream.write(tensor.view(torch.uint8).numpy().data)
