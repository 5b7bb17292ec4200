"""The whole table of Trinity's keys: finds the row of a key, and the known key nearest to an unknown one."""

from __future__ import annotations

import difflib
from functools import cache

from services.trinity import keys_explorer, keys_trainer
from services.trinity.key import Key, expand

KEYS: tuple[Key, ...] = (*keys_explorer.KEYS, *keys_trainer.KEYS)


@cache
def _rows() -> dict[tuple[str, ...], Key]:
    """Return each name's row, by the name's parts. The first row with a name wins."""
    rows: dict[tuple[str, ...], Key] = {}
    for key in KEYS:
        for name in expand(key.names):
            rows.setdefault(tuple(name.split(".")), key)
    return rows


def find(name: str) -> Key | None:
    """Return the row of a key: the one with its name, or else that of the nearest section with `**`."""
    parts = tuple("*" if part.isdigit() else part for part in name.split("."))
    rows = _rows()
    if parts in rows:
        return rows[parts]
    wholes = ((*parts[:length], "**") for length in range(len(parts), 0, -1))
    return next((rows[whole] for whole in wholes if whole in rows), None)


def is_section(name: str) -> bool:
    """Whether there are keys below this name."""
    parts = tuple("*" if part.isdigit() else part for part in name.split("."))
    return any(row[: len(parts)] == parts for row in _rows())


@cache
def nearest(name: str) -> str | None:
    """Return the most similar known key."""
    known = [".".join(parts) for parts in _rows() if parts[-1] != "**"]
    near = difflib.get_close_matches(name, known, n=1)
    return near[0] if near else None
