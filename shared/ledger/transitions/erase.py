"""Erases the contents of rows on request, and removes rows that are trained on or discarded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, and_, delete, func, or_, select, update

from shared.experience import State, choice_name
from shared.ledger.conditions import MAX_PARAMETERS, AnyRow, are_about, in_parts, is_done, split_name
from shared.ledger.connect import lock_rows
from shared.ledger.prefix import inline_prefix, lock_tokens
from shared.ledger.queries.signals import count_signals
from shared.ledger.tables import experiences, lineage, payloads, signals
from shared.reward import EVERY_LESSON, Lesson


def erase(
    connection: Connection,
    *,
    key_name: str | None = None,
    task_id: str | None = None,
    run_id: str | None = None,
    msg_id: str | None = None,
    after_id: int = 0,
) -> Erased:
    """Delete tokens, texts and signals of some of the rows in this scope; rows not trained on become DISCARDED.

    The narrow row remains, so that the lineage still contains the versions trained on it.
    msg_id: of all choices of a message, or ID#CHOICE.
    after_id: `last_id` of the previous call, which is None at the end.
    """
    scope = {"key_name": key_name, "task_id": task_id, "run_id": run_id}
    named = [experiences.c[name] == value for name, value in scope.items() if value is not None]
    if msg_id is not None:
        message, choice = split_name(msg_id)
        one_choice = and_(experiences.c.msg_id == message, experiences.c.choice == choice)
        named.append(or_(experiences.c.msg_id == msg_id, one_choice))
    assert named, "an erasure names whose rows"
    columns = (experiences.c[name] for name in ("id", "msg_id", "choice", "state", "consumed_version"))
    query = select(*columns).where(experiences.c.id > after_id, *named).order_by(experiences.c.id)
    rows = list(connection.execute(query.limit(MAX_PARAMETERS).with_for_update()))  # nothing more is said of them
    ids, names = [row.id for row in rows], sorted({row.msg_id for row in rows})
    replies = [choice_name(row.msg_id, row.choice) for row in rows]
    lock_tokens(connection, [*ids, *_later_turns(connection, replies)])
    _delete_signals(connection, ids)
    _move_requests(connection, ids)
    connection.execute(delete(payloads).where(payloads.c.experience_id.in_(ids)))
    of_them = experiences.c.id.in_(ids)
    connection.execute(update(experiences).where(of_them).values(teaches=0, taught=int(EVERY_LESSON)))
    untrained = experiences.c.state.in_((State.RECORDED, State.READY))
    connection.execute(update(experiences).where(of_them, untrained).values(state=State.DISCARDED, reason="erased"))
    _blank_later_requests(connection, replies)
    preferring = [row for row in _preferring(connection, rows) if row.id not in ids]
    trained = [*rows, *(row for row in preferring if row.taught & Lesson.PREFERENCE)]
    versions = frozenset(_versions_trained_on(connection, trained))
    leased = sum(row.state == State.LEASED for row in rows) + sum(bool(row.is_leased) for row in preferring)
    last_id = rows[-1].id if len(rows) == MAX_PARAMETERS else None  # fewer: what arrives later is not for this erasure
    return Erased(len(rows), versions, last_id, frozenset(names), leased)


def _versions_trained_on(connection: Connection, rows: Sequence[AnyRow]) -> Iterator[int]:
    """Yield the versions that were trained on these rows, also those that a rollback rejected.

    A trainer that an older Flywheel started stores only the first one, with the row.
    """
    yield from (row.consumed_version for row in rows if row.consumed_version is not None)
    for part in in_parts(lineage.c.experience_id, sorted(row.id for row in rows)):
        yield from connection.execute(select(lineage.c.version).distinct().where(part)).scalars()


def _preferring(connection: Connection, rows: Sequence[AnyRow]) -> Iterator[AnyRow]:
    """Yield the rows that were trained on a preference over these replies, or are leased for one."""
    names = {row.msg_id for row in rows} | {f"{row.msg_id}#{row.choice}" for row in rows}  # as callers may write them
    is_leased = and_(experiences.c.state == State.LEASED, experiences.c.acts.bitwise_and(int(Lesson.PREFERENCE)) != 0)
    known = or_(experiences.c.taught.bitwise_and(int(Lesson.PREFERENCE)) != 0, is_leased)
    columns = (experiences.c[name] for name in ("id", "taught", "consumed_version"))
    query = (
        select(*columns, is_leased.label("is_leased"))
        .distinct()
        .join(signals, are_about())
        .where(signals.c.kind == "preferred_over", known)
    )
    for part in in_parts(signals.c.text, sorted(names)):
        yield from connection.execute(query.where(part))


def _blank_later_requests(connection: Connection, names: list[str]) -> None:
    """Delete the requests of all turns that continue these, because they quote earlier messages.

    Tokens that a prompt repeats from an erased turn are stored with that turn. Only a later turn that is stored whole
    keeps those tokens, until it is erased itself.
    """
    later = _later_turns(connection, names)  # with turns that were recorded while `erase` waited for its locks
    for mine in in_parts(payloads.c.experience_id, sorted(later)):
        connection.execute(update(payloads).where(mine).values(request=None))


def _later_turns(connection: Connection, names: list[str]) -> set[int]:
    """Return the ids of all turns that continue these replies, however far."""
    found: set[int] = set()
    reached = set(names)
    while names:
        later: dict[int, str] = {}
        for theirs in in_parts(experiences.c.parent_id, names):
            query = select(experiences.c.id, experiences.c.msg_id, experiences.c.choice).where(theirs)
            later |= {row.id: choice_name(row.msg_id, row.choice) for row in connection.execute(query)}
        found.update(later)
        names = [name for name in later.values() if name not in reached]
        reached.update(names)
    return found


def remove(connection: Connection, ids: Sequence[int], said: Mapping[int, int] | None = None) -> list[int]:
    """Delete rows that are trained on or discarded, with tokens, texts and signals. Returns their ids.

    said: number of signals of each row when it was copied; rows with later signals are kept.
    """
    removed: list[int] = []
    (done,) = is_done()
    for part in in_parts(experiences.c.id, ids):
        lock_rows(connection, experiences.c.id, part)
        # by a statement of its own, which sees what an erasure deleted before it let go of the rows
        still_done = select(experiences.c.id).where(part, done).order_by(experiences.c.id)
        gone = connection.execute(still_done).scalars().all()
        if said is not None:
            now = count_signals(connection, gone)
            gone = [row_id for row_id in gone if now.get(row_id, 0) == said.get(row_id, 0)]
        _delete_signals(connection, gone)
        inline_prefix(connection, gone)
        _move_requests(connection, gone)
        for table in (payloads, lineage):
            connection.execute(delete(table).where(table.c.experience_id.in_(gone)))
        connection.execute(delete(experiences).where(experiences.c.id.in_(gone)))
        removed += gone
    return removed


def _delete_signals(connection: Connection, ids: Sequence[int]) -> None:
    """Delete the signals about these rows; those about other choices of the same messages stay."""
    mine = experiences.c.id.in_(ids)
    names = select(experiences.c.msg_id).where(mine)
    theirs = select(experiences.c.id).where(are_about(), mine).exists()
    connection.execute(delete(signals).where(signals.c.msg_id.in_(names), theirs))


def _move_requests(connection: Connection, doomed: Sequence[int]) -> None:
    """Move a request that is stored with a choice to be deleted to another choice that keeps its texts."""
    other = experiences.alias("other")
    same_message = and_(other.c.msg_id == experiences.c.msg_id, other.c.id.not_in(doomed))
    heirs = (
        select(experiences.c.id, func.min(other.c.id).label("heir"))
        .join(other, same_message)
        .join(payloads, payloads.c.experience_id == other.c.id)  # an erased choice has none
        .where(experiences.c.id.in_(doomed))
        .group_by(experiences.c.id)
    )
    for row_id, heir in connection.execute(heirs).all():
        stored = select(payloads.c.request).where(payloads.c.experience_id == row_id).scalar_subquery()
        lacking = (payloads.c.experience_id == heir, payloads.c.request.is_(None))
        connection.execute(update(payloads).where(*lacking).values(request=stored))


@dataclass(frozen=True, slots=True)
class Erased:
    """The result of one call of `erase`."""

    rows: int
    versions: frozenset[int]  # versions trained on these rows
    last_id: int | None
    names: frozenset[str] = frozenset()  # ids of the messages
    # rows that a trainer has leased, or others for a preference over these: versions may contain them that the ledger
    # does not name yet
    leased: int = 0
