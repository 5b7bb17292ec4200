"""Appends a JSON line for each update to a file, which is renamed when it is full: two files of bounded size."""

from __future__ import annotations

from pathlib import Path

import msgspec

from trainer_service.watch.record import Record

NAME = "figures.jsonl"


class JsonLines:
    """Appends to figures.jsonl. A line that a crash truncated stays on its own line."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._file, self._max_bytes = folder / NAME, max_bytes

    def write(self, record: Record) -> None:
        """Raises OSError."""
        if self._file.exists() and self._file.stat().st_size >= self._max_bytes:
            self._file.replace(self._file.with_name("figures.1.jsonl"))
        with self._file.open("ab+") as file:
            if file.tell():
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(msgspec.json.encode(record.as_json()) + b"\n")
