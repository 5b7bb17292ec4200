"""Converts a dataset's rows to samples and records them, for `flywheel import`.

Rows with tokens are recorded unchanged. In other rows the last message is the reply: render.py makes its tokens, once,
and the engine computes their logprobs by the newest version that it holds, which the row names. No version sampled such
a reply.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection

from explorer_service.chat.conversation import DIGEST_BYTES, read_prompt
from explorer_service.engines.admin import EngineAdmin, open_client
from explorer_service.errors import EngineRefused, EngineUnavailable
from services.render import end_tokens, render
from shared.adapters import adapter_version
from shared.config import Config, RewardConfig
from shared.engine_token import known_token
from shared.errors import EngineError, StartupError
from shared.experience import Sample, Sampling, choice_name
from shared.ledger import transitions
from shared.ledger.conditions import split_name
from shared.ledger.given import (
    NOT_OURS,
    UNUSABLE,
    Trained,
    choice_of,
    conversation_of,
    exchange_of,
    names_of,
    number_of,
    quarantine_of,
    signals_of,
    texts_of,
    time_of,
    tokens_of,
    trained_of,
    version_end_of,
)
from shared.ledger.queries import exchange_of_choice, known_choices
from shared.reward import Kind, Scope, Signal
from shared.tokenizer import tokenizer_digest
from shared.versions import version_path

TIMEOUT_S = 120.0
Names = dict[str, str | None]  # of a row, as given.names_of returns them
SignalsByKey = list[tuple[tuple[str | None, Scope], list[Signal]]]  # oldest first; by key, None: no key
_DEMONSTRATION = Signal("demonstration")


class ImportedRow(NamedTuple):
    """A row of a file."""

    sample: Sample
    signals: SignalsByKey
    trained: Trained | None
    quarantine: str | None = None  # why the row was in quarantine; None: it was not
    parent: str | None = None  # the choice that it continued when it was recorded: ID or ID#CHOICE


class SampleReader:
    """Converts rows to samples. Uses the first engine to tokenize rows without tokens."""

    def __init__(self, config: Config, versions: Iterable[int], published: Iterable[int] = ()) -> None:
        """versions: those that may serve. published: all of this ledger, which rows with tokens may name.

        Other rows with tokens get the newest version, but do not count as sampled by it.
        """
        self._config = config
        self._versions = frozenset(versions)
        self._published = self._versions.union(published)
        self._newest = max(self._versions, default=0)
        folders = (config.root / version_path(0), Path(config.model.path))
        self._ends = end_tokens(*folders)
        self._tokenizer = next(filter(None, map(tokenizer_digest, folders)), None)  # None: it is not known
        self.reasons: set[str] = set()  # reasons why rows were left out
        self._alike: Counter[bytes] = Counter()  # rows without a message id, by content

    async def read(self, rows: list[dict[str, Any]]) -> list[ImportedRow]:
        """Return each usable row. Raises StartupError if a required engine fails, or for another model's tokens."""
        samples: list[ImportedRow] = []
        async with open_client() as client:
            url, name = self._config.explorer.engines[0].url, self._config.model.name
            engine = EngineAdmin(client, url, name, TIMEOUT_S, known_token(self._config))
            for row in rows:
                try:
                    names = names_of(row)
                    sample, signals = await self._sample(row, names, engine), self._signals(row)
                    about = trained_of(row), quarantine_of(row), names["parent_id"]
                    samples.append(ImportedRow(sample, signals, *about))
                except UNUSABLE as exc:
                    self.reasons.add(str(exc) or type(exc).__name__)
                except EngineError as exc:
                    remedy = "; start `flywheel up` or `flywheel engine`" if isinstance(exc, EngineUnavailable) else ""
                    raise StartupError(f"rows without tokens need an engine: {exc}{remedy}") from exc
        return samples

    async def _sample(self, row: dict[str, Any], names: Names, engine: EngineAdmin) -> Sample:
        created_at, (messages, tools) = time_of(row, time.time()), conversation_of(row)
        (msg_id, choice), (version, version_end) = choice_of(row, names["msg_id"] or ""), self._versions_of(row)
        if row.get("prompt_ids") is not None:
            self._require_same_tokenizer(row)
            tokens, sampling = tokens_of(row)
        elif messages and messages[-1].get("role") == "assistant":
            (name, version), version_end = await self._held_by(engine), NOT_OURS
            tokens, sampling = await render(engine, messages, tools, self._ends, name), Sampling()
        else:
            raise ValueError("a row needs prompt_ids, reply_ids and logprobs, or messages that end with the model's")
        tokens.check()
        sampling.check()
        request, reply = texts_of(row) if self._config.explorer.store_text else (None, None)
        msg_id = msg_id or self._name_of(row)
        exchange, extends = _links(names, choice_name(msg_id, choice), messages)
        return Sample(
            msg_id=msg_id,
            choice=choice,
            version=version,
            version_end=version_end,
            tokens=tokens,
            sampling=sampling,
            finish_reason=names["finish_reason"] or "stop",
            created_at=created_at,
            latency_s=0.0,
            task_id=names["task_id"],
            run_id=names["run_id"],
            key_name=names["key_name"],
            key_group=names["key_group"],
            request=request,
            reply=reply,
            exchange=exchange_of(row) or exchange,
            extends=extends,
        )

    def _versions_of(self, row: dict[str, Any]) -> tuple[int, int]:
        """Return the versions of this ledger that sampled the first and the last token. Raises ValueError.

        Without such a first one: the newest version, and NOT_OURS.
        """
        first, last = number_of(row, "version"), version_end_of(row)
        if row.get("version") is None or first not in self._published:
            return self._newest, NOT_OURS
        return first, last if last in self._published else NOT_OURS

    def _require_same_tokenizer(self, row: dict[str, Any]) -> None:
        """Raise StartupError for a row whose tokens are of another tokenizer than the model's, if both are known."""
        theirs, ours = row.get("tokenizer"), self._tokenizer
        if None not in (theirs, ours) and theirs != ours:
            raise StartupError(
                f"row {row.get('msg_id')!r}: its tokens are of the tokenizer {theirs}, and the model of this ledger "
                f"has {ours}; export the rows without --tokens, and the engine makes tokens of their messages"
            )

    async def _held_by(self, engine: EngineAdmin) -> tuple[str | None, int]:
        """Return the name of an adapter at the engine, and the newest version that the engine holds.

        No name: that version is no adapter. An engine that shows no label counts as holding the newest version.
        """
        model = self._config.model
        if model.kind == "lora":
            loaded = {adapter_version(model.name, name): name for name in await engine.list_models()}
            newest = max((version for version in loaded if version in self._versions), default=0)
            return loaded.get(newest), newest
        try:
            label = await engine.read_label(may_load=True)
        except EngineRefused:  # this process does not know the engines' token
            label = None
        number, _, digest = (label or "").partition(":")
        version = int(number) if digest and number.isascii() and number.isdigit() else self._newest
        return None, version if version in self._versions else self._newest

    def _name_of(self, row: dict[str, Any]) -> str:
        """Return a message id for a row without one: stable over readings of its file, and unique among equal rows."""
        content = hashlib.sha256(msgspec.json.encode(row, order="deterministic", enc_hook=str)).digest()
        self._alike[content] += 1
        return f"import-{hashlib.sha256(content + b'%d' % self._alike[content]).hexdigest()[:32]}"

    def _signals(self, row: dict[str, Any]) -> SignalsByKey:
        """Return the row's signals, or else its reward. Without both, a reply that was not sampled is a demonstration.

        Raises ValidationError and ValueError.
        """
        signals = signals_of(row, self._config.reward) or ([_DEMONSTRATION] if row.get("prompt_ids") is None else [])
        by_key = groupby(signals, key=lambda signal: (signal.key_name, signal.scope))
        return [(key, list(signals)) for key, signals in by_key]


def _links(names: Names, name: str, messages: list[dict[str, Any]]) -> tuple[bytes, tuple[bytes, ...]]:
    """Return the digests of a row's exchange and of those that it may continue: from messages, or else from names."""
    if messages:
        digest, extends = read_prompt(messages[:-1], names["key_name"], names["task_id"], names["run_id"])
        return digest.add_reply(messages[-1]), extends
    parent = names["parent_id"]
    return _digest_of_name(name), () if parent is None else (_digest_of_name(parent),)


def _digest_of_name(name: str) -> bytes:
    msg_id, choice = split_name(name)
    return hashlib.blake2b(f"row {choice_name(msg_id, choice or 0)}".encode(), digest_size=DIGEST_BYTES).digest()


def _linked(connection: Connection, sample: Sample, parent: str | None) -> Sample:
    """Return the sample as a continuation of its parent, if that is in the ledger; else as its messages tell."""
    continued = None if parent is None else exchange_of_choice(connection, *split_name(parent))
    return sample if continued is None else replace(sample, extends=(continued,))


def _restore_trained(connection: Connection, sample: Sample, trained: Trained) -> None:
    transitions.restore_trained(
        connection,
        sample.msg_id,
        sample.choice,
        lessons=trained.lessons,
        manifest_sha256=trained.manifest_sha256,
        trained_by={version.manifest_sha256: version.consumed for version in trained.versions},
    )


def store(
    connection: Connection,
    rows: list[ImportedRow],
    *,
    rule: RewardConfig,
    learned: frozenset[Kind],
    default_reward: float | None,
) -> int:
    """Record the rows that are not in the ledger, with their signals. Returns their number.

    A row that a version of this ledger was trained on is CONSUMED: only other lessons make it READY. One that was in
    quarantine stays there.
    learned: the kinds of signals that are learned from. default_reward: for samples without signals.
    """
    transitions.lock_imports(connection)
    known = known_choices(connection, [row.sample.msg_id for row in rows])
    default: SignalsByKey = (
        [] if default_reward is None else [((None, "message"), [Signal("reward", value=default_reward)])]
    )
    stored = 0
    for sample, signals_by_key, trained, quarantine, parent in rows:
        if (sample.msg_id, sample.choice) in known:
            continue
        known.add((sample.msg_id, sample.choice))  # a file may contain a row twice
        linked = _linked(connection, sample, parent)
        transitions.record(connection, [linked], waits=False)  # one at a time: a turn is linked to the previous turn
        stored += 1
        is_silent = all(signals == [_DEMONSTRATION] for _, signals in signals_by_key)
        for (key_name, scope), signals in [*signals_by_key, *(default if is_silent else ())]:
            transitions.apply_feedback(
                connection,
                msg_ids=[f"{sample.msg_id}#{sample.choice}"],
                task_id=None,
                run_id=None,
                signals=signals,
                rule=rule,
                learned=learned,
                key_name=key_name,
                scope=scope,
            )
        if trained is not None:
            _restore_trained(connection, sample, trained)
        if quarantine is not None:
            transitions.restore_quarantine(connection, sample.msg_id, sample.choice, reason=quarantine)
    return stored
