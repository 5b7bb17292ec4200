"""Stores the tokens of conversations once: a turn's prompt omits what it repeats of the previous turn (decision 11).

An agent's next prompt usually begins with the prompt and the reply of the previous turn, token for token. The payload
of such a turn names that experience (`prefix_of`) and contains the rest of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sqlalchemy import Connection, select, update

from shared.experience import CorruptTokens, Tokens
from shared.ledger.conditions import in_parts
from shared.ledger.connect import lock_rows
from shared.ledger.tables import payloads

_SHORTEST = 32  # tokens; a shorter prefix does not justify the query for the other turn
_MOST_TURNS = 16  # number of turns joined to read one; the next turn is stored whole again


def load_tokens(connection: Connection, ids: Sequence[int]) -> dict[int, Tokens | CorruptTokens]:
    """Return the whole tokens of these experiences, or why they cannot be read; erased ones are absent."""
    found = _with_prefixes(connection, ids)
    return {row_id: found[row_id].tokens for row_id in ids if row_id in found}


@dataclass(frozen=True, slots=True)
class _Whole:
    tokens: Tokens | CorruptTokens
    turns: int  # number of turns that were joined


def _with_prefixes(connection: Connection, ids: Sequence[int], *, lock: bool = False) -> dict[int, _Whole]:
    """Follow `prefix_of` to turns that are stored whole: one query for each step, at most _MOST_TURNS.

    (PostgreSQL would plan one recursive query with a scan of the whole table.)
    lock: prevent deletion of these rows until this transaction ends (PostgreSQL; SQLite has one writer).
    """
    stored: dict[int, Any] = {}
    asked: set[int] = set()
    wanted = set(ids)
    while wanted:
        found = list(_fetch(connection, sorted(wanted), lock))
        stored.update((row.experience_id, row) for row in found)
        asked |= wanted
        wanted = {row.prefix_of for row in found if row.prefix_of is not None} - asked
    whole: dict[int, _Whole] = {}
    for row_id in sorted(stored):  # a turn has a larger id than the one it continues
        whole[row_id] = _resolve(stored[row_id], whole)
    return whole


def _fetch(connection: Connection, ids: list[int], lock: bool) -> Iterator[Any]:
    columns = (payloads.c.experience_id, payloads.c.prefix_of, payloads.c.tokens)
    for mine in in_parts(payloads.c.experience_id, ids):
        query = select(*columns).where(mine).order_by(payloads.c.experience_id.desc())
        if lock and connection.dialect.name == "postgresql":  # omitted on SQLite, but compiled for each chat
            query = query.with_for_update(read=True)
        yield from connection.execute(query)


def _resolve(row: Any, whole: dict[int, _Whole]) -> _Whole:
    try:
        own = Tokens.decode(row.tokens)
    except CorruptTokens as corrupt:
        return _Whole(corrupt, 1)
    if row.prefix_of is None:
        return _Whole(own, 1)
    before = whole.get(row.prefix_of)
    if before is None:
        return _Whole(CorruptTokens("the tokens that its prompt begins with were erased"), 1)
    earlier = before.tokens
    if isinstance(earlier, CorruptTokens):
        return _Whole(CorruptTokens(f"the turn that its prompt begins with: {earlier}"), 1)
    prompt = np.concatenate((earlier.prompt_ids, earlier.reply_ids, own.prompt_ids))
    return _Whole(replace(own, prompt_ids=prompt), before.turns + 1)


def share_prefix(connection: Connection, turns: Sequence[tuple[Tokens, int | None]]) -> list[tuple[Tokens, int | None]]:
    """Return what to store for each (tokens, id of the continued experience): the rest, and the id if it is shared."""
    parents = sorted({parent for _, parent in turns if parent is not None})
    if not parents:
        return list(turns)
    before = _with_prefixes(connection, parents, lock=True)
    return [_without_prefix(tokens, parent, before) for tokens, parent in turns]


def _without_prefix(tokens: Tokens, parent: int | None, before: dict[int, _Whole]) -> tuple[Tokens, int | None]:
    found = before.get(parent) if parent is not None else None
    if found is None or found.turns >= _MOST_TURNS or isinstance(found.tokens, CorruptTokens):
        return tokens, None
    earlier = found.tokens
    n_prompt, n_shared = len(earlier.prompt_ids), len(earlier.prompt_ids) + len(earlier.reply_ids)
    prompt = tokens.prompt_ids
    if (
        _SHORTEST <= n_shared <= len(prompt)
        and np.array_equal(prompt[:n_prompt], earlier.prompt_ids)
        and np.array_equal(prompt[n_prompt:n_shared], earlier.reply_ids)
    ):
        return replace(tokens, prompt_ids=prompt[n_shared:]), parent
    return tokens, None


def lock_tokens(connection: Connection, ids: Sequence[int]) -> None:
    """Wait for transactions that record a next turn of these experiences now, and prevent others (PostgreSQL).

    The newest tokens are locked first, as when a next turn is recorded, which follows `prefix_of`.
    """
    row_id = payloads.c.experience_id
    for mine in in_parts(row_id, sorted(ids, reverse=True)):
        lock_rows(connection, row_id, mine, newest_first=True)


def inline_prefix(connection: Connection, doomed: Sequence[int]) -> None:
    """Store turns whole again that share tokens with these, which are about to be deleted."""
    row_id = payloads.c.experience_id
    stay = select(row_id).where(payloads.c.prefix_of.in_(doomed), row_id.not_in(doomed))
    # with the turns that are changed below: none is locked after a row with a smaller id
    lock_tokens(connection, [*doomed, *connection.execute(stay).scalars()])
    for one, tokens in load_tokens(connection, connection.execute(stay).scalars().all()).items():
        if isinstance(tokens, Tokens):
            values = {"tokens": tokens.encode(), "prefix_of": None}
            connection.execute(update(payloads).where(row_id == one).values(values))
