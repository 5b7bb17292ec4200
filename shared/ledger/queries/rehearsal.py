"""Draws rows that were trained on, to learn again from their written answers and words. They are only read."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from sqlalchemy import ColumnElement, Connection, not_, or_, select, text

from shared.experience import Experience, State, VersionState
from shared.ledger.conditions import in_parts
from shared.ledger.queries.lease import load_rows
from shared.ledger.tables import REHEARSABLE, experiences, lineage, versions
from shared.reward import EVERY_LESSON, Kind, lessons_of

_NEWEST = 100_000  # size of the pool, in rows


def draw_rehearsal(
    connection: Connection,
    share: float,
    rows: Sequence[Experience],
    seed: int,
    kinds: Collection[Kind],
    vocabulary: int | None,
    max_tokens: int | None,
) -> list[Experience]:
    """Return rows that were trained on for signals of these kinds, at most `share` times as many as `rows`, rounded up.

    Quarantined and erased rows, and those in `rows`, are excluded, and those of the batches of a rejected version:
    after a rollback, what may have made it worse is not learned again by itself. `flywheel rollback --again` asks for
    it, so versions before a row's present first one do not count. The draw depends on the seed and on `rows`, so that
    it is the same for the same batch after a crash. Unusable rows are left out of the result: those with a correction
    of a whole, which is about the whole's last reply.
    """
    lessons = int(lessons_of(kinds))
    known_for = experiences.c.taught.bitwise_and(lessons) != 0
    is_erased = experiences.c.taught == int(EVERY_LESSON)
    is_kept = (experiences.c.state != State.DISCARDED, not_(is_erased), *_are_good())
    pool = select(experiences.c.id).where(text(REHEARSABLE), known_for, *is_kept)
    fresh = {row.id for row in rows}
    newest = connection.execute(pool.order_by(experiences.c.id.desc()).limit(_NEWEST))
    known = sorted(set(newest.scalars()) - fresh)
    count = min(len(known), int(np.ceil(share * len(rows))))
    order = np.random.default_rng([seed, *sorted(fresh)]).permutation(len(known))
    ids = [known[place] for place in order[:count]]
    query = select(experiences).order_by(experiences.c.id)
    stored = [row for mine in in_parts(experiences.c.id, ids) for row in connection.execute(query.where(mine))]
    acts = {row.id: row.taught & lessons for row in stored}
    last_signal = {row.id: row.last_signal for row in stored}
    found, _ = load_rows(connection, stored, acts, vocabulary, kinds, max_tokens)
    return [kept for row in found if (kept := _as_rehearsal(row, last_signal[row.id])).signals]


def _are_good() -> tuple[ColumnElement[bool], ...]:
    """Rows that no rejected version consumed. A trainer of an older Flywheel stores only a row's first version."""
    first = experiences.c.consumed_version
    rejected = select(versions.c.version).where(versions.c.state == VersionState.REJECTED)
    consumed = select(lineage.c.version).where(lineage.c.experience_id == experiences.c.id, lineage.c.consumed)
    by_rejected = consumed.where(lineage.c.version >= first, lineage.c.version.in_(rejected)).exists()
    return or_(first.is_(None), first.not_in(rejected)), ~by_rejected


def _as_rehearsal(row: Experience, last_signal: int) -> Experience:
    """last_signal: the last one in the log when the row was claimed; later ones have not acted yet."""
    acted = (one for one in row.signals if one.id is None or one.id <= last_signal)
    kept = (one for one in acted if one.kind != "correction" or one.scope == "message")
    return replace(row, signals=tuple(kept), is_rehearsal=True)
