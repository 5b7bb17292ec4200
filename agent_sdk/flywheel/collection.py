"""Joins a Collector's log for `flywheel import`: each chat once, with its later feedback."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from flywheel.errors import ConfigError

Row = dict[str, Any]


def merge(log: Path, out: Path) -> int:
    """Join a collector's log: each row once, with its later rewards and feedback. Returns the number of rows.

    reward is the sum of the named rewards; `signals` lists all of them as `flywheel import` reads them. A truncated
    line is left out. Raises ConfigError if both paths are one file, which opening would empty.
    """
    if out.exists() and out.samefile(log):
        raise ConfigError(f"{out} is the log itself: give another file")
    said: dict[str, Row] = defaultdict(dict)
    for line in _lines(log):
        if "of" in line:
            for name in ("rewards", "user_feedback"):
                said[line["of"]].setdefault(name, {}).update(line.get(name) or {})
    count = 0
    with out.open("w", encoding="utf-8") as file:
        for row in _lines(log):
            if "of" in row:
                continue
            more = {name: value for name, value in said.get(row.get("msg_id", ""), {}).items() if value}
            if "rewards" in more:
                more["reward"] = math.fsum(more["rewards"].values())
            more |= {"signals": signals} if (signals := _signals(more)) else {}
            file.write(json.dumps({**row, **more}, ensure_ascii=False) + "\n")
            count += 1
    return count


def _signals(said: Row) -> list[Row]:
    """Convert a row's feedback to the form of Flywheel's signals. A numeric rating becomes a metric."""
    feedback = said.get("user_feedback", {})
    rating, comment = feedback.get("rating"), feedback.get("comment")
    metrics = dict(said.get("rewards", {}))
    if isinstance(rating, (int, float)):
        metrics["rating"] = rating
    found: list[Row] = [{"kind": "metric", "name": name, "value": float(value)} for name, value in metrics.items()]
    if "reward" in said:
        found.append({"kind": "reward", "value": said["reward"]})
    if rating in ("up", "down"):
        found.append({"kind": "rating", "text": rating})
    return [*found, {"kind": "comment", "text": comment}] if comment else found


def end_cut_line(file: BinaryIO) -> None:
    """Add a line break after a line that a crash truncated, so that the next one starts on its own line."""
    if file.seek(0, io.SEEK_END):
        file.seek(-1, io.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def _lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):  # truncated
                yield json.loads(line)
