"""Loads tasks, and gives them names that stay the same from one start to the next."""

from __future__ import annotations

import csv
import hashlib
import json
import random
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from flywheel.errors import ConfigError

Task = Mapping[str, Any]
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def new_task_id() -> str:
    """Return a unique name that sorts by time."""
    return f"task-{int(time.time() * 1000):012x}-{uuid.uuid4().hex[:12]}"


class NamedTask(NamedTuple):
    """A task and its digest: of its content, and of how often it occurred before."""

    digest: str
    task: Task


def load_tasks(source: str | Path | Iterable[Task]) -> list[NamedTask]:
    """Load tasks from a .jsonl or .csv file, or any iterable of mappings: a list, a generator, a Hugging Face dataset.

    Raises ConfigError for an unreadable file, naming the line, for a task that is no JSON, and if there is no task.

    >>> [named.task for named in load_tasks([{"question": "1+1", "answer": "2"}])]
    [{'question': '1+1', 'answer': '2'}]
    """
    try:
        rows = iter(_read_file(Path(source)) if isinstance(source, (str, Path)) else source)
    except TypeError as exc:
        raise ConfigError(f"tasks={source!r}: give a .jsonl or .csv file, or mappings, such as a list of them") from exc
    seen: Counter[str] = Counter()
    found = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(f"task {number} is a {type(row).__name__}: give mappings, such as {{'question': …}}")
        try:
            text = json.dumps(row, sort_keys=True, default=_stable)
        except (TypeError, ValueError) as exc:
            raise ConfigError(
                f"task {number} has no form in JSON ({exc}): give it, and mappings in it, texts as keys"
            ) from exc
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        seen[digest] += 1
        found.append(NamedTask(digest if seen[digest] == 1 else f"{digest}.{seen[digest]}", row))
    if not found:
        raise ConfigError(f"no task in {source!r}: give at least one")
    return found


def _stable(value: object) -> object:
    """Return for JSON what is the same in each process: a set has no order, and an object has another address."""
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(json.dumps(one, sort_keys=True, default=_stable) for one in value)}
    return _ADDRESS.sub("", repr(value))


def _read_file(path: Path) -> Iterable[Task]:
    if path.suffix not in (".jsonl", ".csv"):
        raise ConfigError(f"tasks={str(path)!r}: give a .jsonl or .csv file")
    read = _read_csv if path.suffix == ".csv" else _read_jsonl
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            yield from read(path, file)
    except OSError as exc:
        raise ConfigError(f"tasks={str(path)!r}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path} is not UTF-8; convert it") from exc


def _read_csv(path: Path, file: TextIO) -> Iterator[Task]:
    rows = csv.DictReader(file)
    try:
        for row in rows:
            if None in row:
                raise ConfigError(
                    f"{path}, line {rows.line_num} has more cells than the first; quote a cell with commas"
                )
            yield row
    except csv.Error as exc:
        raise ConfigError(f"{path}, after line {rows.line_num}: {exc}") from exc


def _read_jsonl(path: Path, file: TextIO) -> Iterator[Task]:
    for number, line in enumerate(file, 1):
        if line.strip():
            yield _read_line(path, number, line)


def _read_line(path: Path, number: int, line: str) -> Task:
    try:
        row = json.loads(line)
    except ValueError as exc:
        raise ConfigError(f"{path}, line {number} is no JSON: {exc}") from exc
    if not isinstance(row, dict):
        raise ConfigError(f"{path}, line {number} is no object: a task is one")
    return row


def shuffled(tasks: list[NamedTask], seed: int, epoch: int) -> list[NamedTask]:
    """Return the tasks in the order of an epoch, which is the same each time."""
    order = list(tasks)
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def digest_of(tasks: list[NamedTask]) -> str:
    """Return a digest of a set of tasks in any order."""
    return hashlib.sha256("".join(sorted(task.digest for task in tasks)).encode()).hexdigest()[:12]
