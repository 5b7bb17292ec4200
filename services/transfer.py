"""Rows out of the ledger and in: `flywheel export`, `import` and `archive`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from sqlalchemy import Connection

from explorer_service.conversation import read_prompt
from explorer_service.engines.client import EngineClient, open_session
from shared.config import Config
from shared.errors import ConfigError, EngineError, StartupError
from shared.experience import CorruptTokens, Sample, Sampling, State, Tokens, new_message_id
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.dataset import conversations, read_rows, replace_whole
from shared.ledger.queries import count_rows, is_done, known_choices, list_versions, oldest_done, size_bytes
from shared.ledger.tables import experiences
from shared.reward import Kind, Signal

_CHUNK = 500  # rows in one transaction
_ARCHIVE_ROWS = 10_000  # rows in one file of an archive


def export(
    config: Config,
    out: Path,
    *,
    state: str | None,
    min_reward: float | None,
    task_id: str | None,
    with_tokens: bool = False,
) -> int:
    """Write a slice of the ledger as a dataset."""
    where = []
    if state is not None:
        if state not in list(State):
            raise ConfigError(f"--state {state!r}: choose one of {', '.join(State)}")
        where.append(experiences.c.state == state)
    if min_reward is not None:
        where.append(experiences.c.reward >= min_reward)
    if task_id is not None:
        where.append(experiences.c.task_id == task_id)
    counted = {"written": 0, "without text": 0}
    console = Console(stderr=True)
    ledger = Ledger.open(config.ledger_url)

    def rows(connection: Connection) -> Iterator[dict[str, Any]]:
        for number, row in enumerate(conversations(connection, where, with_tokens), start=1):
            counted["without text" if row is None else "written"] += 1
            if row is not None:
                yield row
            if number % 100_000 == 0:
                console.print(f"{number} rows read")

    try:
        with ledger.read() as connection:
            replace_whole(out, rows(connection))
    finally:
        ledger.close()
    console.print(f"{counted['written']} rows in {out}; {counted['without text']} have no text")
    return 0


# ------------------------------------------------------------------------------------------------------ import


def import_rows(config: Config, file: Path, *, reward: float | None, commit: bool) -> int:
    """Record the conversations of a file as if they had been chats of the newest version.

    Rows with tokens are taken as they are. Of others the last message is the reply: the engine's chat template makes
    tokens of it, once, and the engine says how likely it finds them. reward: of rows that bring none. commit: make
    the rewarded ones ready for training. Rows that stand already are passed over.
    """
    console = Console(stderr=True)
    counted = {"imported": 0, "known": 0, "unusable": 0}
    ledger = Ledger.open(config.ledger_url)
    try:
        with ledger.read() as connection:
            versions = [row.version for row in list_versions(connection) if row.state != "REJECTED"]
        reader = _Reader(config, version=max(versions, default=0), versions=frozenset(versions))
        rows = read_rows(file)
        while part := list(islice(rows, _CHUNK)):
            samples = asyncio.run(reader.samples(part))
            counted["unusable"] += len(part) - len(samples)
            with ledger.write() as connection:
                stored = _store(connection, samples, config, reward)
            counted["imported"] += stored
            counted["known"] += len(samples) - stored
            console.print(", ".join(f"{count} {what}" for what, count in counted.items()))
        for reason in sorted(reader.reasons):
            console.print(f"unusable: {reason}")
        if commit:
            with ledger.write() as connection:
                committed, ready = transitions.commit(connection)
            console.print(f"{committed} rows committed, {ready} ready")
    finally:
        ledger.close()
    return 0 if counted["imported"] or counted["known"] else 1


def _store(connection: Connection, samples: list[_Row], config: Config, reward: float | None) -> int:
    known = known_choices(connection, [sample.msg_id for sample, _ in samples])
    new = []
    for sample, said in samples:
        if (sample.msg_id, sample.choice) not in known:
            known.add((sample.msg_id, sample.choice))  # a file may hold a row twice
            new.append((sample, said))
    of_all = [(None, [Signal("reward", value=reward)])] if reward is not None else []
    for sample, said in new:
        transitions.record(connection, [sample])  # one by one: a turn finds the one before it
        for key_name, signals in said or of_all:
            target, rule = f"{sample.msg_id}#{sample.choice}", config.reward
            transitions.apply_feedback(
                connection, msg_ids=[target], task_id=None, run_id=None, said=signals, rule=rule, key_name=key_name
            )
    return len(new)


_Heard = list[tuple[str | None, list[Signal]]]  # what was said about a row, oldest first, by the key that said it
_Row = tuple[Sample, _Heard]


class _Said(msgspec.Struct):
    """A signal as `export --tokens` writes it."""

    kind: Kind
    value: float | None = None
    name: str | None = None
    text: str | None = None
    key_name: str | None = None


class _Reader:
    """Makes samples of a dataset's rows; asks the engine for the tokens of those that have none."""

    def __init__(self, config: Config, version: int, versions: frozenset[int]) -> None:
        self._config = config
        self._version = version
        self._versions = versions
        self.reasons: set[str] = set()  # why rows were left out

    async def samples(self, rows: list[dict[str, Any]]) -> list[_Row]:
        """A sample and what was said about it, for each usable row.

        Raises StartupError when no engine answers and one is needed.
        """
        found = []
        async with open_session() as session:
            engine = EngineClient(session, self._config.explorer.engines[0].url, self._config.model.name, 120.0)
            for row in rows:
                try:
                    found.append((await self._sample(row, engine), _heard(row)))
                except (CorruptTokens, _Unusable, KeyError, TypeError, ValueError, msgspec.ValidationError) as exc:
                    self.reasons.add(str(exc) or type(exc).__name__)
                except EngineError as exc:
                    raise StartupError(f"rows without tokens need an engine that answers: {exc}") from exc
        return found

    async def _sample(self, row: dict[str, Any], engine: EngineClient) -> Sample:
        messages = row.get("messages")
        if row.get("prompt_ids") is not None:
            tokens = Tokens(
                np.array(row["prompt_ids"], np.int32),
                np.array(row["reply_ids"], np.int32),
                np.array(row["logprobs"], np.float32),
            )
            sampling = Sampling(**{k: type(getattr(Sampling(), k))(v) for k, v in (row.get("sampling") or {}).items()})
        elif isinstance(messages, list) and messages and messages[-1].get("role") == "assistant":
            tokens, sampling = await _ask_for_tokens(engine, messages, row.get("tools")), Sampling()
        else:
            raise _Unusable("a row needs prompt_ids, reply_ids and logprobs, or messages that end with the assistant's")
        tokens.check()
        version = row.get("version")
        request = (
            {"messages": messages[:-1], **({"tools": row["tools"]} if row.get("tools") else {})} if messages else None
        )
        digest, extends = read_prompt((messages or [])[:-1], None, row.get("task_id"), row.get("run_id"))
        return Sample(
            msg_id=str(row.get("msg_id") or new_message_id("import-")),
            choice=int(row.get("choice") or 0),
            version=version if version in self._versions else self._version,
            version_end=version if version in self._versions else self._version,
            tokens=tokens,
            sampling=sampling,
            finish_reason=row.get("finish_reason") or "stop",
            created_at=float(row.get("created_at") or time.time()),
            latency_s=0.0,
            task_id=row.get("task_id"),
            run_id=row.get("run_id"),
            request=None if request is None else msgspec.json.encode(request),
            reply=None if not messages else msgspec.json.encode(messages[-1]),
            exchange=digest.add_reply(messages[-1]) if messages else None,
            extends=extends,
        )


class _Unusable(Exception):
    """A row that nothing can be learned from."""


def _heard(row: dict[str, Any]) -> _Heard:
    """The row's signals; of a file without them, its reward. Raises ValueError for what is none."""
    signals = msgspec.convert(row.get("signals") or [], list[_Said])
    if signals:
        by_key = groupby(signals, key=lambda said: said.key_name)
        return [(key, [Signal(one.kind, one.value, one.name, one.text) for one in said]) for key, said in by_key]
    value = row.get("reward")
    return [] if value is None else [(None, [Signal("reward", value=float(value))])]


async def _ask_for_tokens(engine: EngineClient, messages: list[Any], tools: Any) -> Tokens:
    """The tokens of a conversation by the model's own template; logprobs as the engine computes them now."""
    prompt = await engine.tokenize(messages[:-1], tools, ends_with_reply=False)
    whole = await engine.tokenize(messages, tools, ends_with_reply=True)
    silent = await engine.tokenize([*messages[:-1], {"role": "assistant", "content": ""}], tools, ends_with_reply=True)
    after = silent[len(prompt) :]  # what the template writes after a reply; the model samples the first of it
    if whole[: len(prompt)] != prompt or silent[: len(prompt)] != prompt or not after:
        raise _Unusable("the model's chat template does not write a reply after its prompt")
    reply = whole[len(prompt) : len(whole) - len(after) + 1]
    logprobs = (await engine.score([*prompt, *reply]))[len(prompt) - 1 :]
    return Tokens(np.array(prompt, np.int32), np.array(reply, np.int32), np.array(logprobs, np.float32))


# ----------------------------------------------------------------------------------------------------- archive


def archive(config: Config, folder: Path, *, older_than_days: float | None, keep_gb: float | None) -> int:
    """Move old rows that were trained on or discarded into files, oldest first; `flywheel import` brings them back.

    A file stands, on disk, before its rows leave the ledger: what a crash leaves is at most a file too many, whose
    rows an import passes over.
    """
    if older_than_days is None and keep_gb is None:
        raise ConfigError("archive: say what goes with --older-than-days or --keep-gb")
    console = Console(stderr=True)
    ledger = Ledger.open(config.ledger_url)
    moved = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        before = None if older_than_days is None else time.time() - 86400 * older_than_days
        left = None if keep_gb is None else _rows_over(ledger, keep_gb)
        while left is None or left > 0:
            at_most = _ARCHIVE_ROWS if left is None else min(left, _ARCHIVE_ROWS)
            with ledger.read() as connection:
                ids = oldest_done(connection, before=before, at_most=at_most)
                if not ids:
                    break
                file = folder / f"rows-{ids[0]:012}-{ids[-1]:012}.jsonl.gz"
                mine = [experiences.c.id.between(ids[0], ids[-1]), *is_done(before)]
                replace_whole(
                    file, (row for row in conversations(connection, mine, with_tokens=True) if row is not None)
                )
            with ledger.write() as connection:
                moved += transitions.remove(connection, ids)
            left = None if left is None else left - len(ids)
            console.print(f"{moved} rows archived; {file}")
    except OSError as exc:
        raise StartupError(f"{folder} cannot be written ({exc.strerror}); name another folder") from exc
    finally:
        ledger.close()
    console.print(f"{moved} rows moved to {folder}")
    return 0


def _rows_over(ledger: Ledger, keep_gb: float) -> int:
    """How many rows of mean size are too many."""
    with ledger.read() as connection:
        size, rows = size_bytes(connection), count_rows(connection)
    return max(0, round((size - keep_gb * 1e9) / size * rows)) if size else 0
