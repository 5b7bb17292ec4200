"""The replies that rows of a batch are preferred over. They are read in any state, and not claimed.

A preference is used if both replies answer the same prompt, token for token. Others are left out with a reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace

import numpy as np
from sqlalchemy import Connection, select

from shared.experience import CorruptTokens, Experience, Other, Sampling, Tokens, choice_name
from shared.ledger.conditions import AnyRow, in_parts, split_name
from shared.ledger.prefix import load_tokens
from shared.ledger.queries.rows import ids_of
from shared.ledger.queries.signals import load_signals
from shared.ledger.tables import experiences
from shared.reward import Kind, Signal

Edges = dict[str, set[str]]  # name of a choice → names of those that it is preferred over
Logs = dict[tuple[str, int], list[Signal]]  # by message and choice
_KINDS: tuple[Kind, ...] = ("preferred_over",)
_LONGEST_CHAIN, _MOST_LINKED = 100, 1000  # preferences in a row, and replies, that are followed beyond a batch's own
_SAMPLING = [field.name for field in fields(Sampling)]
_COLUMNS = ("id", "msg_id", "choice", "key_group", *_SAMPLING)


def with_preferences(
    connection: Connection, rows: Sequence[Experience], vocabulary: int | None = None, max_tokens: int | None = None
) -> list[Experience]:
    """Add to the rows the replies that they are preferred over, from their signals `preferred_over`.

    vocabulary, max_tokens: see `Tokens.check`; a reply that fails this check is unknown.
    """
    named = {row.id: list(_named(row.signals)) for row in rows}
    if not any(named.values()):
        return list(rows)
    found = _find(connection, sorted({split_name(name)[0] for names in named.values() for name in names}))
    choices = [row for choices in found.values() for row in choices]
    logs = load_signals(connection, [*rows, *choices], _KINDS)  # including signals that acted before
    logs = _linked(connection, logs, set(found))
    return prefer(rows, found, _read(connection, choices, vocabulary, max_tokens), logs)


def ids_read(connection: Connection, rows: Sequence[Experience]) -> set[int]:
    """Return the ids of these rows and of the replies that they are preferred over, as far as they are stored.

    Training on the rows reads all of these.
    """
    others = (split_name(other.name) for row in rows for other in row.preferred_over)
    choices = {(row.msg_id, row.choice) for row in rows} | {(msg_id, choice or 0) for msg_id, choice in others}
    return ids_of(connection, choices)


def _linked(connection: Connection, logs: Logs, known: set[str]) -> Logs:
    """Add the logs of replies to which further preferences lead, because a cycle may be longer than two.

    known: messages with the logs of all their choices.
    """
    most = len(logs) + _MOST_LINKED
    for _ in range(_LONGEST_CHAIN):
        named = {split_name(name)[0] for signals in logs.values() for name in _named(signals)} - known
        if not named or len(logs) >= most:
            break
        known |= named
        choices = [row for rows in _find(connection, sorted(named)).values() for row in rows]
        logs |= load_signals(connection, choices, _KINDS)
    return logs


def prefer(
    rows: Sequence[Experience],
    found: Mapping[str, Sequence[AnyRow | Experience]],
    others: Mapping[int, Other],
    logs: Mapping[tuple[str, int], Sequence[Signal]],
) -> list[Experience]:
    """Add to the rows the replies that they are preferred over.

    found: all choices of the named messages, by message; others: the readable ones of these, by row id; logs: signals
    about them, and about the rows if more are known than those that act.
    """
    edges = _edges({**{(row.msg_id, row.choice): row.signals for row in rows}, **logs})
    return [_prefer(row, list(_named(row.signals)), found, others, edges) for row in rows]


def _named(signals: Sequence[Signal]) -> Iterator[str]:
    """Yield the names that a row is preferred over, as callers sent them, each once."""
    yield from dict.fromkeys(one.text for one in signals if one.kind == "preferred_over" and one.text)


def _find(connection: Connection, messages: Sequence[str]) -> dict[str, list[AnyRow]]:
    """Return all choices of these messages."""
    found: dict[str, list[AnyRow]] = defaultdict(list)
    query = select(*(experiences.c[name] for name in _COLUMNS)).order_by(experiences.c.id)
    for mine in in_parts(experiences.c.msg_id, messages):
        for row in connection.execute(query.where(mine)):
            found[row.msg_id].append(row)
    return found


def _read(
    connection: Connection, rows: Sequence[AnyRow], vocabulary: int | None, max_tokens: int | None
) -> dict[int, Other]:
    """Return replies by row id, except erased, damaged or unusable ones."""
    loaded = load_tokens(connection, [row.id for row in rows])
    found = {}
    for row in rows:
        tokens = loaded.get(row.id)
        sampling = Sampling(*(row._mapping[name] for name in _SAMPLING))
        try:
            if isinstance(tokens, Tokens):
                tokens.check(vocabulary, max_tokens)
                sampling.check()
                found[row.id] = Other(choice_name(row.msg_id, row.choice), tokens, sampling)
        except CorruptTokens:
            continue
    return found


def _edges(logs: Mapping[tuple[str, int], Sequence[Signal]]) -> Edges:
    """Return the preferences in these logs."""
    choices: dict[str, list[int]] = defaultdict(list)
    for msg_id, choice in logs:
        choices[msg_id].append(choice)
    edges: Edges = defaultdict(set)
    for (msg_id, choice), signals in logs.items():
        for message, one in map(split_name, _named(signals)):
            named = {choice_name(message, each) for each in choices.get(message, ()) if one in (None, each)}
            edges[choice_name(msg_id, choice)] |= named
    return edges


def _prefer(
    row: Experience,
    names: list[str],
    found: Mapping[str, Sequence[AnyRow | Experience]],
    others: Mapping[int, Other],
    edges: Edges,
) -> Experience:
    own = choice_name(row.msg_id, row.choice)
    keys = {one.text: one.key_name for one in row.signals if one.kind == "preferred_over"}  # the last one that sent it
    chosen: dict[str, Other] = {}
    unused: dict[str, str] = {}  # by name
    for name in names:
        message, one = split_name(name)
        same_group = [other for other in found.get(message, ()) if other.key_group == row.key_group]
        meant = [other for other in same_group if one in (None, other.choice)]
        if one is None and len(meant) > 1:
            meant = [other for other in meant if other.id != row.id]  # the other choices of the same message
        if not meant:
            unused[name] = "preference_unknown"
        for other in meant:
            read = others.get(other.id)
            reason = _reason(row, own, read, edges) if read is not None else "preference_unknown"
            if reason is None and read is not None:
                chosen[read.name] = replace(read, key=keys[name])
            elif reason is not None:
                unused[choice_name(other.msg_id, other.choice)] = reason
    return replace(row, preferred_over=tuple(chosen.values()), unused=(*row.unused, *unused.values()))


def _reason(row: Experience, own: str, other: Other, edges: Edges) -> str | None:
    """Return why a preference is not used; None: it is used."""
    if other.name == own:
        return "preference_of_itself"
    if not np.array_equal(other.tokens.prompt_ids, row.tokens.prompt_ids):
        return "preference_other_prompt"
    if np.array_equal(other.tokens.reply_ids, row.tokens.reply_ids):
        return "preference_of_equals"
    return "preference_circle" if _leads(other.name, own, edges) else None


def _leads(start: str, end: str, edges: Edges) -> bool:
    """Whether preferences lead from one choice to another."""
    seen, ahead = {start}, [start]
    while ahead:
        following = edges.get(ahead.pop(), set()) - seen
        seen |= following
        ahead += following
    return end in seen
