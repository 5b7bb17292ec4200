"""Every change of state in the ledger, and nowhere else.

A row's way:   record → RECORDED → commit → READY → claim → LEASED → publish → CONSUMED
               any of the first three → DISCARDED with a reason; LEASED → READY when a lease is given back or runs out
A version's:   publish → PUBLISHED → SERVING → RETIRED, or REJECTED with a reason

Each function runs inside the caller's writing transaction and changes rows only by statements that name the state they
come from, so whoever loses a race changes nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from sqlalchemy import (
    CTE,
    ColumnElement,
    Connection,
    Row,
    Select,
    Update,
    and_,
    delete,
    func,
    insert,
    literal,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from shared.config import RewardConfig
from shared.experience import CorruptTokens, Experience, Lease, Sample, Sampling, State, Tokens
from shared.ledger.queries import is_done
from shared.ledger.tables import batches, experiences, idempotency, payloads, signals, trainers, versions
from shared.reward import Signal, reward_of
from shared.versions import version_path

_LARGEST_REWARD = 1e6  # in float32 a critic's loss of its square still is a number
_MAX_PARAMETERS = 1000  # values in one IN list
_MAX_ALIKE = 32  # exchanges that say the same, newest first, among which a parent is chosen
AnyRow = Row[*tuple[Any, ...]]
ReceiptState = Literal["applied", "updated", "duplicate", "unknown", "already_trained", "expired"]


# ---------------------------------------------------------------------------------------------------- 2 record


def record(connection: Connection, samples: Sequence[Sample]) -> None:
    """Store samples. One that must not be trained on is stored as DISCARDED with its reason.

    Raises sqlalchemy.exc.IntegrityError when a message id with that choice exists already.
    """
    if not samples:
        return
    parents = [_find_parent(connection, sample.extends) if sample.extends else None for sample in samples]
    rows = [_experience_row(*of) for of in zip(samples, parents, strict=True)]
    texts = [(s.tokens.encode(), s.request, s.reply, s.msg_id, s.choice) for s in samples]
    insert_row, insert_payload = _INSERTS[connection.dialect.paramstyle == "qmark"]
    connection.exec_driver_sql(insert_row, rows)
    connection.exec_driver_sql(insert_payload, texts)
    _name_conversations(connection, [parent for parent in parents if parent is not None])


def _insert_statements(mark: str) -> tuple[str, str]:
    """A sample's two inserts as the driver takes them: on chat's hot path building them costs more than storing."""
    names = ", ".join(_ROW)
    marks = ", ".join([mark] * len(_ROW))
    return (
        f"INSERT INTO {experiences.name} ({names}) VALUES ({marks})",
        f"INSERT INTO {payloads.name} (experience_id, tokens, request, reply)"
        f" SELECT id, {mark}, {mark}, {mark} FROM {experiences.name} WHERE msg_id = {mark} AND choice = {mark}",
    )


def choice_name(msg_id: str, choice: int) -> str:
    """How one choice is named: ID for the first, ID#CHOICE for another."""
    return f"{msg_id}#{choice}" if choice else msg_id


def _name_conversations(connection: Connection, parents: Sequence[AnyRow]) -> None:
    """What stood alone has another turn now, and begins a conversation of its own name."""
    alone = {row.id: choice_name(row.msg_id, row.choice) for row in parents if row.conversation_id is None}
    for row_id, name in sorted(alone.items()):  # in the order in which feedback locks rows
        mine = and_(experiences.c.id == row_id, experiences.c.conversation_id.is_(None))
        connection.execute(update(experiences).where(mine).values(conversation_id=name))


def _find_parent(connection: Connection, extends: Sequence[bytes]) -> AnyRow | None:
    """The exchange that a request continues: the longest; of several alike, one that nobody has continued yet."""
    columns = (experiences.c.id, experiences.c.msg_id, experiences.c.choice, experiences.c.conversation_id)
    for exchange in extends:
        alike = select(*columns).where(experiences.c.exchange == exchange).order_by(experiences.c.id.desc())
        rows = connection.execute(alike.limit(_MAX_ALIKE)).all()
        if len(rows) == 1:
            return rows[0]
        if rows:
            names = [choice_name(row.msg_id, row.choice) for row in rows]
            continued = select(experiences.c.parent_id).where(experiences.c.parent_id.in_(names))
            counts = Counter(connection.execute(continued).scalars())
            chosen: AnyRow = min(reversed(rows), key=lambda row: counts[choice_name(row.msg_id, row.choice)])
            return chosen
    return None


_ROW = (
    "msg_id", "choice", "parent_id", "conversation_id", "exchange", "task_id", "run_id", "key_name", "key_group",
    "version", "version_end", "state", "reason", "n_prompt", "n_reply", "temperature", "top_p", "top_k", "min_p",
    "finish_reason", "latency_s", "created_at",
)  # fmt: skip


def _experience_row(sample: Sample, parent: AnyRow | None) -> tuple[Any, ...]:
    """The values of _ROW."""
    parent_name = None if parent is None else choice_name(parent.msg_id, parent.choice)
    return (
        sample.msg_id,
        sample.choice,
        parent_name,
        None if parent is None else parent.conversation_id or parent_name,
        sample.exchange,
        sample.task_id,
        sample.run_id,
        sample.key_name,
        sample.key_group,
        sample.version,
        sample.version_end,
        "DISCARDED" if sample.quarantine else "RECORDED",
        f"quarantined: {sample.quarantine}" if sample.quarantine else None,
        len(sample.tokens.prompt_ids),
        len(sample.tokens.reply_ids),
        sample.sampling.temperature,
        sample.sampling.top_p,
        sample.sampling.top_k,
        sample.sampling.min_p,
        sample.finish_reason,
        sample.latency_s,
        sample.created_at,
    )


_INSERTS = {is_qmark: _insert_statements("?" if is_qmark else "%s") for is_qmark in (True, False)}


# -------------------------------------------------------------------------------------------------- 3 feedback


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of feedback for one target, as the caller named it."""

    msg_id: str
    state: ReceiptState


def apply_feedback(
    connection: Connection,
    *,
    msg_ids: Sequence[str],
    task_id: str | None,
    run_id: str | None,
    said: Sequence[Signal],
    rule: RewardConfig,
    key_name: str | None = None,
    key_group: str | None = None,
    conversations: bool = False,
) -> list[Receipt]:
    """Append signals to the log of every target and set the reward, by `rule`, of those that are not leased yet.

    Targets: each of `msg_ids` ("ID" is all choices of a message, "ID#2" one), or else the rows of task and run. With
    both, rows whose chat named no task or run take these: runners that chat unmarked name them here.
    key_group: reach only rows of this group; None: all rows.
    conversations: reach every turn of the conversations that the targets belong to.
    Returns one receipt for each id named, and for each message found by task, run or conversation; an id nobody knows
    is `unknown`.
    """
    mine = true() if key_group is None else experiences.c.key_group == key_group
    found: dict[str, list[AnyRow]] = {}
    if msg_ids:
        found = {name: _rows_of(connection, and_(_is_message(name), mine)) for name in dict.fromkeys(msg_ids)}
        _attribute(connection, [row for rows in found.values() for row in rows], task_id, run_id)
    else:
        for row in _rows_of(connection, and_(_in_scope(task_id, run_id), mine)):
            found.setdefault(row.msg_id, []).append(row)
    if conversations:
        reached = {row.id for rows in found.values() for row in rows}
        names = {row.conversation_id for rows in found.values() for row in rows if row.conversation_id is not None}
        for row in _rows_of(connection, and_(experiences.c.conversation_id.in_(names), mine)):
            if row.id not in reached:
                found.setdefault(choice_name(row.msg_id, row.choice), []).append(row)
    now = time.time()
    return [
        Receipt(name, _apply(connection, rows, said, rule, key_name, now) if rows else "unknown")
        for name, rows in found.items()
    ]


def _rows_of(connection: Connection, where: ColumnElement[bool]) -> list[AnyRow]:
    columns = (
        experiences.c.id,
        experiences.c.msg_id,
        experiences.c.choice,
        experiences.c.conversation_id,
        experiences.c.task_id,
        experiences.c.run_id,
        experiences.c.state,
        experiences.c.reward,
    )
    query = select(*columns).where(where).order_by(experiences.c.id)
    if connection.dialect.name == "postgresql":
        query = query.with_for_update()  # SQLite's BEGIN IMMEDIATE has locked all already
    return list(connection.execute(query))


def _attribute(connection: Connection, rows: Sequence[AnyRow], task_id: str | None, run_id: str | None) -> None:
    for column, value in ((experiences.c.task_id, task_id), (experiences.c.run_id, run_id)):
        ids = [row.id for row in rows if value is not None and row._mapping[column.name] is None]
        for start in range(0, len(ids), _MAX_PARAMETERS):
            mine = experiences.c.id.in_(ids[start : start + _MAX_PARAMETERS])
            connection.execute(update(experiences).where(mine, column.is_(None)).values({column: value}))


def _is_message(name: str) -> ColumnElement[bool]:
    msg_id, mark, index = name.rpartition("#")
    if mark and index.isascii() and index.isdigit() and len(index) < 10:
        return and_(experiences.c.msg_id == msg_id, experiences.c.choice == int(index))
    return experiences.c.msg_id == name


def _apply(
    connection: Connection,
    rows: list[AnyRow],
    said: Sequence[Signal],
    rule: RewardConfig,
    key_name: str | None,
    now: float,
) -> ReceiptState:
    open_rows = [row for row in rows if row.state in (State.RECORDED, State.READY)]
    log = _signals_of(connection, rows)
    if open_rows and all(_says_again(log[row.msg_id, row.choice], said) for row in rows):
        return "duplicate"
    connection.execute(
        insert(signals),
        [
            {
                "msg_id": row.msg_id,
                "choice": row.choice,
                "kind": signal.kind,
                "name": signal.name,
                "value": signal.value,
                "text": signal.text,
                "key_name": key_name,
                "created_at": now,
            }
            for row in rows
            for signal in said
        ],
    )
    if not open_rows:
        return "expired" if all(row.state == State.DISCARDED for row in rows) else "already_trained"
    changed: dict[float | None, list[int]] = {}
    for row in open_rows:
        reward = reward_of([*log[row.msg_id, row.choice], *said], rule)
        if reward != row.reward:
            changed.setdefault(reward, []).append(row.id)
    for reward, ids in changed.items():
        _set_reward(connection, ids, reward, feedback_key=key_name)
    return "updated" if changed and any(row.reward is not None for row in open_rows) else "applied"


def _says_again(log: list[Signal], said: Sequence[Signal]) -> bool:
    """Whether everything said now is the last that was said of its kind."""
    last = {(signal.kind, signal.name): signal for signal in log}
    return all(last.get((signal.kind, signal.name)) == signal for signal in said)


def _signals_of(connection: Connection, rows: Sequence[AnyRow]) -> dict[tuple[str, int], list[Signal]]:
    """The log of each row, oldest first."""
    log: dict[tuple[str, int], list[Signal]] = {(row.msg_id, row.choice): [] for row in rows}
    names = sorted({msg_id for msg_id, _ in log})
    for start in range(0, len(names), _MAX_PARAMETERS):
        mine = signals.c.msg_id.in_(names[start : start + _MAX_PARAMETERS])
        for row in connection.execute(select(signals).where(mine).order_by(signals.c.id)):
            if (row.msg_id, row.choice) in log:
                log[row.msg_id, row.choice].append(Signal(row.kind, row.value, row.name, row.text))
    return log


def _set_reward(connection: Connection, ids: Sequence[int], reward: float | None, **more: str | None) -> None:
    for start in range(0, len(ids), _MAX_PARAMETERS):
        mine = experiences.c.id.in_(ids[start : start + _MAX_PARAMETERS])
        still_open = experiences.c.state.in_((State.RECORDED, State.READY))
        connection.execute(update(experiences).where(mine, still_open).values(reward=reward, **more))


def recompute_rewards(connection: Connection, rule: RewardConfig, after_id: int = 0) -> tuple[int, int | None]:
    """Apply the rule to some of the rows that are not leased yet and of which something was said.

    after_id: where the last call ended. Returns (rows changed, where the next call begins; None at the end).
    """
    about = select(signals.c.id).where(
        signals.c.msg_id == experiences.c.msg_id, signals.c.choice == experiences.c.choice
    )
    columns = (experiences.c.id, experiences.c.msg_id, experiences.c.choice, experiences.c.reward)
    mine = (experiences.c.id > after_id, experiences.c.state.in_((State.RECORDED, State.READY)), about.exists())
    query = select(*columns).where(*mine).order_by(experiences.c.id).limit(_MAX_PARAMETERS)
    rows = list(connection.execute(query))
    log = _signals_of(connection, rows)
    changed = 0
    for row in rows:
        reward = reward_of(log[row.msg_id, row.choice], rule)
        if reward != row.reward:
            _set_reward(connection, [row.id], reward)
            changed += 1
    return changed, rows[-1].id if rows else None


def remember_answer(connection: Connection, key: str, response: bytes) -> None:
    """Keep the answer to an idempotency key, in the same transaction as what it reports."""
    connection.execute(insert(idempotency).values(key=key, response=response, created_at=time.time()))


def remembered_answer(connection: Connection, key: str) -> bytes | None:
    """The answer first given to this idempotency key."""
    return connection.execute(select(idempotency.c.response).where(idempotency.c.key == key)).scalar()


def erase(
    connection: Connection,
    *,
    key_name: str | None = None,
    task_id: str | None = None,
    run_id: str | None = None,
    msg_id: str | None = None,
    after_id: int = 0,
) -> Erased:
    """Delete tokens, texts and signals of some of the rows in this scope; what was not trained on becomes DISCARDED.

    The narrow row stays, so that lineage still says which versions it went into.
    after_id: where the last call ended. `last_id` of the answer is None at the end.
    """
    scope = {"key_name": key_name, "task_id": task_id, "run_id": run_id, "msg_id": msg_id}
    named = [experiences.c[name] == value for name, value in scope.items() if value is not None]
    assert named, "an erasure names whose rows"
    columns = (experiences.c.id, experiences.c.msg_id, experiences.c.consumed_version)
    query = select(*columns).where(experiences.c.id > after_id, *named).order_by(experiences.c.id)
    rows = list(connection.execute(query.limit(_MAX_PARAMETERS)))
    ids, names = [row.id for row in rows], sorted({row.msg_id for row in rows})
    connection.execute(delete(payloads).where(payloads.c.experience_id.in_(ids)))
    connection.execute(delete(signals).where(signals.c.msg_id.in_(names)))
    untrained = experiences.c.state.in_((State.RECORDED, State.READY))
    connection.execute(
        update(experiences).where(experiences.c.id.in_(ids), untrained).values(state=State.DISCARDED, reason="erased")
    )
    went_into = frozenset(row.consumed_version for row in rows if row.consumed_version is not None)
    return Erased(len(rows), went_into, rows[-1].id if rows else None)


def remove(connection: Connection, ids: Sequence[int]) -> int:
    """Delete rows that nobody will train on any more, with tokens, texts and signals. Returns how many."""
    removed = 0
    for start in range(0, len(ids), _MAX_PARAMETERS):
        mine = experiences.c.id.in_(ids[start : start + _MAX_PARAMETERS])
        (done,) = is_done(None)
        names = select(experiences.c.msg_id).where(mine, done)
        its_choice = and_(experiences.c.msg_id == signals.c.msg_id, experiences.c.choice == signals.c.choice)
        theirs = select(experiences.c.id).where(its_choice, mine, done).exists()
        connection.execute(delete(signals).where(signals.c.msg_id.in_(names), theirs))
        gone = select(experiences.c.id).where(mine, done)
        connection.execute(delete(payloads).where(payloads.c.experience_id.in_(gone)))
        removed += connection.execute(delete(experiences).where(mine, done)).rowcount
    return removed


@dataclass(frozen=True, slots=True)
class Erased:
    """What one call of `erase` did."""

    rows: int
    versions: frozenset[int]  # that the rows went into
    last_id: int | None


# ---------------------------------------------------------------------------------------------------- 4 commit


def commit(
    connection: Connection,
    *,
    task_id: str | None = None,
    run_id: str | None = None,
    before: float | None = None,
    key_group: str | None = None,
) -> tuple[int, int]:
    """RECORDED → READY for every rewarded row of the scope.

    before: only rows recorded before this moment, Unix seconds. key_group: only rows of this group; None: all.
    Returns: (rows made ready now, rows ready in all).
    """
    where: list[ColumnElement[bool]] = [
        experiences.c.state == State.RECORDED,
        experiences.c.reward.is_not(None),
        _in_scope(task_id, run_id),
    ]
    if before is not None:
        where.append(experiences.c.created_at < before)
    if key_group is not None:
        where.append(experiences.c.key_group == key_group)
    committed = connection.execute(update(experiences).where(*where).values(state=State.READY)).rowcount
    return committed, count_ready(connection)


def expire(connection: Connection, *, before: float, at_most: int = 10_000) -> int:
    """RECORDED → DISCARDED for rows without a reward that were recorded before this moment, Unix seconds.

    Returns how many, up to `at_most`, so that no transaction holds the writers up.
    """
    old = (
        select(experiences.c.id)
        .where(experiences.c.state == State.RECORDED, experiences.c.reward.is_(None), experiences.c.created_at < before)
        .order_by(experiences.c.id)
        .limit(at_most)
    )
    unrewarded = (experiences.c.id.in_(old), experiences.c.state == State.RECORDED, experiences.c.reward.is_(None))
    return connection.execute(
        update(experiences).where(*unrewarded).values(state=State.DISCARDED, reason="expired: no reward came in time")
    ).rowcount


def _in_scope(task_id: str | None, run_id: str | None) -> ColumnElement[bool]:
    conditions: list[ColumnElement[bool]] = [experiences.c.id.is_not(None)]
    if task_id is not None:
        conditions.append(experiences.c.task_id == task_id)
    if run_id is not None:
        conditions.append(experiences.c.run_id == run_id)
    return and_(*conditions)


def count_ready(connection: Connection, *, at_most: int | None = None, after_id: int = 0) -> int:
    """How many rows wait for a trainer; counted up to `at_most`, from `after_id` on."""
    ready = select(experiences.c.id).where(*_ready_after(after_id)).limit(at_most).subquery()
    return int(connection.execute(select(func.count()).select_from(ready)).scalar_one())


def _ready_after(after_id: int) -> list[ColumnElement[bool]]:
    ready: list[ColumnElement[bool]] = [experiences.c.state == State.READY]
    return [*ready, experiences.c.id > after_id] if after_id else ready


# ----------------------------------------------------------------------------------------------------- 5 claim


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
    eligible: list[ColumnElement[bool]] = [experiences.c.state == State.READY]
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
    for start in range(0, len(ids), _MAX_PARAMETERS):
        mine = experiences.c.id.in_(ids[start : start + _MAX_PARAMETERS])
        connection.execute(update(experiences).where(mine).values(state=State.LEASED, batch_id=batch_id))
    return batch_id


def _oldest(eligible: list[ColumnElement[bool]], at_most: int, after_id: int) -> Select[Any]:
    """The rows in whose order trajectories are claimed."""
    columns = (experiences.c.id, experiences.c.conversation_id)
    here = [*eligible, experiences.c.id > after_id] if after_id else eligible
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
        .where(experiences.c.id.in_(select(mates.c.id)), experiences.c.state == State.READY)
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
    stale = (*_ready_after(after_id), experiences.c.version < newest - at_most_behind)
    reason = f"stale: more than {at_most_behind} versions behind (trainer.max_staleness_versions)"
    return connection.execute(update(experiences).where(*stale).values(state=State.DISCARDED, reason=reason)).rowcount


def load_lease(connection: Connection, batch_id: int) -> Lease:
    """The rows of a batch, oldest first. Rows whose tokens cannot be read are listed apart, with the reason."""
    query = (
        select(experiences, payloads.c.tokens)
        .outerjoin(payloads, payloads.c.experience_id == experiences.c.id)
        .where(experiences.c.batch_id == batch_id, experiences.c.state == State.LEASED)
        .order_by(experiences.c.id)
    )
    lease = Lease(batch_id, [])
    for row in connection.execute(query):
        if row.tokens is None:
            lease.corrupt[row.id] = "its tokens were erased"
            continue
        try:
            tokens = Tokens.decode(row.tokens)
            tokens.check()
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


def quarantine(connection: Connection, reasons: dict[int, str]) -> None:
    """LEASED → DISCARDED for rows that must not be trained on."""
    for row_id, reason in reasons.items():
        connection.execute(
            update(experiences)
            .where(experiences.c.id == row_id, experiences.c.state == State.LEASED)
            .values(state=State.DISCARDED, reason=f"quarantined: {reason}")
        )


def close_empty_batch(connection: Connection, batch_id: int) -> None:
    """LEASED → RETURNED for a batch whose rows were all quarantined."""
    connection.execute(
        update(batches).where(batches.c.id == batch_id, batches.c.state == "LEASED").values(state="RETURNED")
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
        update(batches).where(batches.c.id.in_(ids), batches.c.state == "LEASED").values(state="RETURNED")
    )
    return connection.execute(
        update(experiences)
        .where(experiences.c.batch_id.in_(ids), experiences.c.state == State.LEASED)
        .values(state=State.READY, batch_id=None)
    ).rowcount


# --------------------------------------------------------------------------------------------------- 8 publish


class LeaseLost(Exception):
    """A batch is no longer held by this trainer: its update must not become official."""


def publish(
    connection: Connection,
    *,
    version: int,
    parent: int | None,
    kind: str,
    step: int,
    trainer: str | None = None,
    batch_ids: Collection[int] = (),
    state_path: str | None = None,
    stats: dict[str, float] | None = None,
) -> None:
    """Make a version official: its row, CONSUMED for the batches in it, and the trainer state that contains them.

    One transaction: after a crash either all of it stands or none. Raises LeaseLost when a batch is not ours any more.
    """
    now = time.time()
    connection.execute(
        insert(versions).values(
            version=version,
            parent=parent,
            kind=kind,
            path=version_path(version),
            state="PUBLISHED",
            step=step,
            created_at=now,
        )
    )
    if trainer is None:
        return
    mine = and_(batches.c.id.in_(batch_ids), batches.c.owner == trainer, batches.c.state == "LEASED")
    held = connection.execute(update(batches).where(mine).values(state="CONSUMED", consumed_version=version)).rowcount
    if held != len(batch_ids):
        raise LeaseLost(f"{len(batch_ids) - held} of {len(batch_ids)} batches are no longer leased to {trainer!r}")
    connection.execute(
        update(experiences)
        .where(experiences.c.batch_id.in_(batch_ids), experiences.c.state == State.LEASED)
        .values(state=State.CONSUMED, consumed_version=version)
    )
    _save_trainer(
        connection,
        name=trainer,
        step=step,
        version=version,
        state_path=state_path,
        stats=msgspec.json.encode(stats or {}),
        alive=True,
        heartbeat_at=now,
    )


def announce_trainer(connection: Connection, *, name: str, step: int, version: int, state_path: str | None) -> None:
    """A trainer is up, at this point of its line."""
    _save_trainer(
        connection, name=name, step=step, version=version, state_path=state_path, alive=True, heartbeat_at=time.time()
    )


def dismiss_trainer(connection: Connection, *, name: str) -> None:
    """A trainer has stopped in order."""
    connection.execute(update(trainers).where(trainers.c.name == name).values(alive=False))


def _save_trainer(connection: Connection, *, name: str, **columns: Any) -> None:
    make = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement = make(trainers).values(name=name, **columns)
    connection.execute(statement.on_conflict_do_update(index_elements=[trainers.c.name], set_=columns))


# ---------------------------------------------------------------------------------------------------- 9 reload


def serve_version(connection: Connection, version: int) -> None:
    """An engine has proven that it serves this version: SERVING; the one before is RETIRED."""
    connection.execute(
        update(versions).where(versions.c.state == "SERVING", versions.c.version != version).values(state="RETIRED")
    )
    connection.execute(
        update(versions)
        .where(versions.c.version == version, or_(versions.c.state == "PUBLISHED", versions.c.state == "RETIRED"))
        .values(state="SERVING", served_at=func.coalesce(versions.c.served_at, time.time()))
    )
    connection.execute(
        update(versions).where(versions.c.version < version, versions.c.state == "PUBLISHED").values(state="RETIRED")
    )


def reject_version(connection: Connection, version: int, reason: str) -> None:
    """A version's folder is damaged, or no engine reproduces its probe: it never gets traffic."""
    connection.execute(
        update(versions)
        .where(versions.c.version == version, versions.c.state.in_(("PUBLISHED", "SERVING", "RETIRED")))
        .values(state="REJECTED", reason=reason[:2000])
    )


def forget_answers(connection: Connection, *, before: float) -> None:
    """Drop idempotency keys from before this moment, Unix seconds."""
    connection.execute(delete(idempotency).where(idempotency.c.created_at < before))
