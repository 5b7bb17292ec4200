"""5, claim: READY rows are leased to a trainer as a batch; they go back when it gives them back or is not heard of."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import CTE, ColumnElement, Connection, Select, Update, func, insert, literal, select, update

from shared.experience import CorruptTokens, Experience, Lease, Sampling, State, Tokens
from shared.ledger.prefix import load_tokens
from shared.ledger.queries import MAX_PARAMETERS
from shared.ledger.tables import batches, experiences, trainers, versions
from shared.ledger.transitions.rows import choice_name, is_in, ready_after

_LARGEST_REWARD = 1e6  # in float32 a critic's loss of its square still is a number
_IS_READY = is_in(experiences.c.state, State.READY)
_IS_LEASED = is_in(experiences.c.state, State.LEASED)


def claim(
    connection: Connection,
    *,
    owner: str,
    at_least: int,
    at_most: int,
    lease_s: float,
    share_per_key: float = 1.0,
    after_id: int = 0,
) -> int | None:
    """READY → LEASED for the oldest rows, as one batch of `owner`. A trajectory's ready rows are claimed together.

    at_most: rows; a batch exceeds it by what its last trajectory needs to stay whole.
    share_per_key: largest part of `at_most` whose rewards one key has set; it goes before trajectories staying whole.
    after_id: look from here on; a trajectory's older rows come along all the same.
    Returns the batch's id, or None, with nothing changed, when fewer than `at_least` rows can be had.
    """
    eligible: list[ColumnElement[bool]] = [_IS_READY]
    if share_per_key < 1:
        eligible.append(experiences.c.id.in_(_first_of_each_key(max(1, int(share_per_key * at_most)))))
    now = time.time()
    batch = {"owner": owner, "state": "LEASED", "lease_until": now + lease_s, "created_at": now}
    at_least = max(at_least, 1)
    if connection.dialect.name == "postgresql":
        statement = _claim_in_one_statement(batch, eligible, at_least, at_most, after_id)
        batch_id: int | None = connection.execute(statement).scalars().first()
        return batch_id
    mates = _mates(_oldest(eligible, at_most, after_id), eligible)
    ids = connection.execute(_whole_trajectories(mates, at_most)).scalars().all()
    if len(ids) < at_least:
        return None
    batch_id = connection.execute(insert(batches).values(batch).returning(batches.c.id)).scalar_one()
    for start in range(0, len(ids), MAX_PARAMETERS):
        mine = experiences.c.id.in_(ids[start : start + MAX_PARAMETERS])
        connection.execute(update(experiences).where(mine).values(state=State.LEASED, batch_id=batch_id))
    return batch_id


def _oldest(eligible: list[ColumnElement[bool]], at_most: int, after_id: int) -> Select[Any]:
    """The rows in whose order trajectories are claimed."""
    columns = (experiences.c.id, experiences.c.conversation_id)
    here = [*eligible, *ready_after(after_id)]
    return select(*columns).where(*here).order_by(experiences.c.id).limit(at_most)


def _mates(oldest: Select[Any], eligible: list[ColumnElement[bool]]) -> CTE:
    """All rows of the trajectories of the oldest, each with its trajectory's first."""
    rows = oldest.cte("oldest")
    conversation = rows.c.conversation_id
    firsts = (
        select(conversation, func.min(rows.c.id).label("first_id"))
        .where(conversation.is_not(None))
        .group_by(conversation)
        .cte("firsts")
    )
    together = experiences.c.conversation_id == firsts.c.conversation_id
    turns = select(experiences.c.id, firsts.c.first_id).join_from(firsts, experiences, together).where(*eligible)
    alone = select(rows.c.id, rows.c.id.label("first_id")).where(conversation.is_(None))
    return turns.union_all(alone).cte("mates")


def _whole_trajectories(mates: CTE, at_most: int, *where: ColumnElement[bool]) -> Select[Any]:
    """The ids of whole trajectories, oldest first, until `at_most` rows are reached."""
    so_far = func.count().over(order_by=mates.c.first_id)  # with all of its own trajectory
    own = func.count().over(partition_by=mates.c.first_id)
    ranked = select(mates.c.id, (so_far - own).label("before")).where(*where).subquery("ranked")
    return select(ranked.c.id).where(ranked.c.before < at_most).order_by(ranked.c.id)


def _claim_in_one_statement(
    batch: dict[str, Any], eligible: list[ColumnElement[bool]], at_least: int, at_most: int, after_id: int
) -> Update:
    """PostgreSQL's way: rows that another trainer holds locked are passed over, and with them their trajectories."""
    oldest = _oldest(eligible, at_most, after_id).with_for_update(skip_locked=True)
    mates = _mates(oldest, eligible)
    locked = (
        select(experiences.c.id)
        .where(experiences.c.id.in_(select(mates.c.id)), _IS_READY)
        .with_for_update(skip_locked=True)
    ).cte("locked")
    all_of_it = func.count(mates.c.id) == func.count(locked.c.id)
    whole = (
        select(mates.c.first_id)
        .outerjoin_from(mates, locked, locked.c.id == mates.c.id)
        .group_by(mates.c.first_id)
        .having(all_of_it)
    )
    picked = _whole_trajectories(mates, at_most, mates.c.first_id.in_(whole)).cte("picked")
    enough = select(func.count()).select_from(picked).scalar_subquery() >= at_least
    values = select(*(literal(value, batches.c[name].type).label(name) for name, value in batch.items())).where(enough)
    made = insert(batches).from_select(list(batch), values).returning(batches.c.id).cte("made")
    return (
        update(experiences)
        .where(experiences.c.id == picked.c.id, select(made.c.id).exists())
        .values(state=State.LEASED, batch_id=select(made.c.id).scalar_subquery())
        .returning(experiences.c.batch_id)
    )


def _first_of_each_key(at_most: int) -> Select[Any]:
    """Ids of the oldest READY rows of each key that set a reward."""
    rank = func.row_number().over(partition_by=experiences.c.feedback_key, order_by=experiences.c.id).label("rank")
    ranked = select(experiences.c.id, rank).where(experiences.c.state == State.READY).subquery()
    return select(ranked.c.id).where(ranked.c.rank <= at_most)


def discard_stale(connection: Connection, *, at_most_behind: int, after_id: int = 0) -> int:
    """READY → DISCARDED for rows sampled by a version that lies further behind the newest published one.

    Returns how many.
    """
    newest = select(func.max(versions.c.version)).where(versions.c.state != "REJECTED").scalar_subquery()
    stale = (*ready_after(after_id), experiences.c.version < newest - at_most_behind)
    reason = f"stale: more than {at_most_behind} versions behind (trainer.max_staleness_versions)"
    return connection.execute(update(experiences).where(*stale).values(state=State.DISCARDED, reason=reason)).rowcount


def load_lease(connection: Connection, batch_id: int) -> Lease:
    """The rows of a batch, oldest first. Rows whose tokens cannot be read are listed apart, with the reason."""
    held = select(experiences).where(experiences.c.batch_id == batch_id, _IS_LEASED)
    rows = connection.execute(held.order_by(experiences.c.id)).all()
    loaded = load_tokens(connection, [row.id for row in rows])
    lease = Lease(batch_id, [])
    for row in rows:
        try:
            tokens = _whole(loaded.get(row.id))
        except CorruptTokens as exc:
            lease.corrupt[row.id] = str(exc)
            continue
        if row.reward is None or abs(row.reward) > _LARGEST_REWARD:
            lease.corrupt[row.id] = f"reward {row.reward} is beyond ±{_LARGEST_REWARD:g}: its square would be no number"
            continue
        lease.rows.append(
            Experience(
                id=row.id,
                msg_id=row.msg_id,
                choice=row.choice,
                parent_id=row.parent_id,
                task_id=row.task_id,
                run_id=row.run_id,
                conversation_id=row.conversation_id or choice_name(row.msg_id, row.choice),
                version=row.version,
                reward=row.reward,
                created_at=row.created_at,
                tokens=tokens,
                sampling=Sampling(row.temperature, row.top_p, row.top_k, row.min_p),
            )
        )
    return lease


def _whole(tokens: Tokens | CorruptTokens | None) -> Tokens:
    """Tokens that can be trained on. Raises CorruptTokens."""
    if tokens is None:
        raise CorruptTokens("its tokens were erased")
    if isinstance(tokens, CorruptTokens):
        raise tokens
    tokens.check()
    return tokens


def quarantine(connection: Connection, reasons: dict[int, str]) -> None:
    """LEASED → DISCARDED for rows that must not be trained on."""
    for row_id, reason in reasons.items():
        connection.execute(
            update(experiences)
            .where(experiences.c.id == row_id, _IS_LEASED)
            .values(state=State.DISCARDED, reason=f"quarantined: {reason}")
        )


def close_empty_batch(connection: Connection, batch_id: int) -> None:
    """LEASED → RETURNED for a batch whose rows were all quarantined."""
    connection.execute(
        update(batches).where(batches.c.id == batch_id, is_in(batches.c.state, "LEASED")).values(state="RETURNED")
    )


def extend_lease(connection: Connection, *, owner: str, lease_s: float) -> None:
    """The trainer lives: its leases hold for another `lease_s`."""
    now = time.time()
    connection.execute(
        update(batches).where(batches.c.owner == owner, batches.c.state == "LEASED").values(lease_until=now + lease_s)
    )
    connection.execute(update(trainers).where(trainers.c.name == owner).values(heartbeat_at=now))


def any_lease_expired(connection: Connection) -> bool:
    """Whether some trainer's lease has run out."""
    query = select(batches.c.id).where(batches.c.state == "LEASED", batches.c.lease_until < time.time()).limit(1)
    return connection.execute(query).first() is not None


def give_back(connection: Connection, *, owner: str | None = None) -> int:
    """LEASED → READY for an owner's batches, or, with no owner, for every batch whose lease has run out.

    Returns how many rows went back.
    """
    mine = batches.c.owner == owner if owner is not None else batches.c.lease_until < time.time()
    ids = connection.execute(select(batches.c.id).where(batches.c.state == "LEASED", mine)).scalars().all()
    if not ids:
        return 0
    connection.execute(
        update(batches).where(batches.c.id.in_(ids), is_in(batches.c.state, "LEASED")).values(state="RETURNED")
    )
    return connection.execute(
        update(experiences).where(experiences.c.batch_id.in_(ids), _IS_LEASED).values(state=State.READY, batch_id=None)
    ).rowcount
