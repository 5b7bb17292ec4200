"""The tokens of conversations: what a turn's prompt repeats of the turn before is stored once.

An agent's next prompt usually begins with all it was told and said before, token for token. Such a turn's payload names
the experience whose prompt and reply its own prompt begins with (`prefix_of`), and holds the rest. So a conversation
takes room by its length, and not by its square (benchmarks/ledger.py, decision 11).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from sqlalchemy import Connection, select, update

from shared.experience import CorruptTokens, Tokens
from shared.ledger.tables import payloads

MAX_PARAMETERS = 1000  # values in one IN list
_SHORTEST = 32  # tokens: for fewer, looking the other turn up costs more than they take


def load_tokens(connection: Connection, ids: Sequence[int], *, keep: bool = False) -> dict[int, Tokens | CorruptTokens]:
    """The whole tokens of these experiences, or why they cannot be read; none for one whose tokens were erased.

    keep: nobody deletes what was read before this transaction ends (PostgreSQL; SQLite has one writer).
    """
    loaded: dict[int, Tokens | CorruptTokens] = {}
    for start in range(0, len(ids), MAX_PARAMETERS):
        wanted = ids[start : start + MAX_PARAMETERS]
        found = _with_prefixes(connection, wanted, keep)
        loaded.update({row_id: found[row_id] for row_id in wanted if row_id in found})
    return loaded


def _with_prefixes(connection: Connection, ids: Collection[int], keep: bool) -> dict[int, Tokens | CorruptTokens]:
    columns = (payloads.c.experience_id, payloads.c.prefix_of)
    chain = select(*columns).where(payloads.c.experience_id.in_(ids)).cte("chain", recursive=True)
    chain = chain.union(select(*columns).join(chain, payloads.c.experience_id == chain.c.prefix_of))
    query = (
        select(*columns, payloads.c.tokens)
        .where(payloads.c.experience_id.in_(select(chain.c.experience_id)))
        .order_by(payloads.c.experience_id)
    )
    if keep and connection.dialect.name == "postgresql":
        query = query.with_for_update(read=True)
    whole: dict[int, Tokens | CorruptTokens] = {}
    for row in connection.execute(query):  # a turn comes after the one that it continues
        whole[row.experience_id] = _resolve(row, whole)
    return whole


def _resolve(row: Any, whole: dict[int, Tokens | CorruptTokens]) -> Tokens | CorruptTokens:
    try:
        own = Tokens.decode(row.tokens)
    except CorruptTokens as corrupt:
        return corrupt
    if row.prefix_of is None:
        return own
    before = whole.get(row.prefix_of)
    if before is None:
        return CorruptTokens("the tokens that its prompt begins with were erased")
    if isinstance(before, CorruptTokens):
        return CorruptTokens(f"the turn that its prompt begins with: {before}")
    return replace(own, prompt_ids=np.concatenate((before.prompt_ids, before.reply_ids, own.prompt_ids)))


def split_off(connection: Connection, turns: Sequence[tuple[Tokens, int | None]]) -> list[tuple[Tokens, int | None]]:
    """What to store of each (tokens, id of the experience it continues): the tokens left, and that id if any went."""
    parents = sorted({parent for _, parent in turns if parent is not None})
    before = load_tokens(connection, parents, keep=True) if parents else {}
    return [_without_prefix(tokens, parent, before) for tokens, parent in turns]


def _without_prefix(
    tokens: Tokens, parent: int | None, before: dict[int, Tokens | CorruptTokens]
) -> tuple[Tokens, int | None]:
    earlier = before.get(parent) if parent is not None else None
    if not isinstance(earlier, Tokens):
        return tokens, None
    n_prompt, n_shared = len(earlier.prompt_ids), len(earlier.prompt_ids) + len(earlier.reply_ids)
    prompt = tokens.prompt_ids
    if (
        _SHORTEST <= n_shared <= len(prompt)
        and np.array_equal(prompt[:n_prompt], earlier.prompt_ids)
        and np.array_equal(prompt[n_prompt:n_shared], earlier.reply_ids)
    ):
        return replace(tokens, prompt_ids=prompt[n_shared:]), parent
    return tokens, None


def make_whole(connection: Connection, doomed: Sequence[int]) -> None:
    """Give the turns that stay what they share with these, which are about to be deleted."""
    row_id = payloads.c.experience_id
    if connection.dialect.name == "postgresql":  # whoever records a next turn now is waited for, or finds them gone
        connection.execute(select(row_id).where(row_id.in_(doomed)).order_by(row_id).with_for_update()).all()
    stay = select(row_id).where(payloads.c.prefix_of.in_(doomed), row_id.not_in(doomed))
    for one, tokens in load_tokens(connection, connection.execute(stay).scalars().all()).items():
        if isinstance(tokens, Tokens):
            values = {"tokens": tokens.encode(), "prefix_of": None}
            connection.execute(update(payloads).where(row_id == one).values(values))
