"""What a Collector wrote, joined: each chat once, with what was said of it later, as `flywheel import` reads it."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

Row = dict[str, Any]


def merge(log: Path, out: Path) -> int:
    """Join a collector's log: each row once, with the rewards and the feedback that came later. Returns how many rows.

    reward is the sum of the named rewards; `signals` says all of it as `flywheel import` reads it. A line that was
    cut is left out.
    """
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
    """What was said of a row, in the form of Flywheel's log of signals. A rating that is a number becomes a metric."""
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
    """What a log is gone on with begins on a line of its own, where a crash has cut the last one."""
    if file.seek(0, io.SEEK_END):
        file.seek(-1, io.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def _lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):  # one that was cut
                yield json.loads(line)
