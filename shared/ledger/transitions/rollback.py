"""An operator goes back to an earlier version: all later ones are rejected, and trainers start again from it.

Engines then load it, because it is the newest version that may serve. A trainer compares `trainers.rollbacks` with the
number that it read at its start, in each transaction that would continue from a later version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, case, or_, select, update

from shared.config import RewardConfig
from shared.errors import CannotRollBack, RolledBack
from shared.experience import State, VersionState
from shared.ledger.conditions import in_parts
from shared.ledger.connect import lock_rows
from shared.ledger.queries.trainers import list_trainers
from shared.ledger.queries.versions import VersionRow, any_published, find_versions, kept_versions, wanted_versions
from shared.ledger.tables import experiences, lineage, trainer_states, trainers, versions
from shared.ledger.transitions.late_scores import credit_again, scored_and_trained
from shared.ledger.transitions.traffic import lock_shares, move_shares
from shared.ledger.transitions.versions import reject_versions_after
from shared.reward import EVERY_LESSON
from shared.versions import LARGEST_VERSION


@dataclass(frozen=True, slots=True)
class Rollback:
    """What a rollback changed."""

    to: int
    rejected: list[int]  # versions
    trainers: dict[str, bool]  # those that start again, by name: whether with the optimizer's state of that version
    held: dict[str, str]  # of these, those that their breaker holds until an operator resumes them: by which figure
    traffic: dict[int, float]  # shares of the versions that answer chats from now on
    rows: int = 0  # made READY again, or leased ones that are once their trainer returns them


def roll_back(
    connection: Connection, to: int | None = None, *, again: bool = False, by: str, rule: RewardConfig | None = None
) -> Rollback:
    """Reject all versions after `to`, and let their trainers start again from it.

    to: None: the last version that has served before the one in service, which is the newest that answers chats. A
    trainer without a saved state of exactly this version starts from its weights, with a new optimizer. again: train
    again on the rows that a version after `to` was trained on, and none that stays. rule: by which all scores of these
    rows, also those that came after their training, become rewards; None: rewards stay as they are.

    Raises CannotRollBack if no engine has proven `to`, its files are gone, or no saved state contains it yet.
    """
    # first, as in a trainer's transactions: none of them publishes in between what it trained on a later version
    connection.execute(select(trainers.c.name).order_by(trainers.c.name).with_for_update()).all()
    lock_shares(connection)
    version = _previous(connection) if to is None else to
    if not 0 <= version <= LARGEST_VERSION:
        raise _no_such(version)
    lock_rows(connection, versions.c.version, or_(versions.c.version >= version, versions.c.share.is_not(None)))
    _require_served(connection, version)
    rejected = reject_versions_after(connection, version, f"rolled back to version {version}", by=by)
    move_shares(connection, version, by=by)
    rows = _make_ready(connection, version, rule) if again else 0
    returned = _return_trainers(connection, version, rejected)
    tripped = {row.name: row.tripped for row in list_trainers(connection) if row.tripped is not None}
    held = {name: str(tripped[name]["figure"]) for name in returned if name in tripped}
    return Rollback(version, rejected, returned, held, _traffic(connection), rows)


def _previous(connection: Connection) -> int:
    """Return the last version that may be returned to before the one in service. Raises CannotRollBack."""
    rows, saved = kept_versions(connection), _saved_versions(connection)
    proven = [row for row in rows if row.may_serve and row.is_proven]
    newest = max((row.version for row in proven), default=0)
    answering = (row.version for row in proven if row.state == VersionState.SERVING or row.share is not None)
    serving = max(answering, default=newest)
    earlier = [row.version for row in proven if row.version < serving and _is_saved(row, saved)]
    if not any_published(connection):
        raise CannotRollBack("there is no version yet; see `flywheel versions`")
    if not earlier:
        raise CannotRollBack(f"no version before {serving} has served and has its files; see `flywheel versions`")
    return earlier[-1]


def _traffic(connection: Connection) -> dict[int, float]:
    """Return the shares of the versions that should answer chats. An operator may have given all to earlier ones."""
    wanted = wanted_versions(connection)
    return wanted.shares or ({} if wanted.version is None else {wanted.version.version: 1.0})


def _saved_versions(connection: Connection) -> dict[str | None, int]:
    """Return the newest version in a saved state of each trainer."""
    return {row.name: row.version for row in connection.execute(select(trainers.c.name, trainers.c.version))}


def _is_saved(row: VersionRow, saved: Mapping[str | None, int]) -> bool:
    """Whether a saved state of its trainer contains a version."""
    return row.writer not in saved or row.version <= saved[row.writer]


def _no_such(version: int) -> CannotRollBack:
    return CannotRollBack(f"there is no version {version}; see `flywheel versions`")


def _require_served(connection: Connection, version: int) -> None:
    row = find_versions(connection, [version]).get(version)
    if row is None or row.state == VersionState.RESERVED:
        raise _no_such(version)
    if row.deleted_at is not None:
        raise CannotRollBack(f"the files of version {version} are deleted; a tag would have kept them")
    if not (row.may_serve and row.is_proven):
        raise CannotRollBack(f"version {version} is {row.state}; only a version that has served can be returned to")
    saved = _saved_versions(connection)
    if not _is_saved(row, saved):
        raise CannotRollBack(
            f"no saved state of its trainer contains version {version} yet (trainer.save_every); go back to version "
            f"{saved[row.writer]}, or wait"
        )


def _make_ready(connection: Connection, to: int, rule: RewardConfig | None) -> int:
    """CONSUMED → READY, with all that was said, for rows that versions after `to` were trained on, and no kept one.

    If a later signal has made such a row READY already, its earlier signals act again, too. A row that is leased for a
    later signal stays LEASED: its earlier signals act when it is claimed again.
    """
    is_erased = experiences.c.taught == int(EVERY_LESSON)  # it has no tokens, and stays for the lineage
    trained = (
        experiences.c.state.in_((State.CONSUMED, State.READY, State.LEASED)),
        ~is_erased,
        *_of_later(connection, to),
    )
    lock_rows(connection, experiences.c.id, *trained)
    scored = scored_and_trained(connection, *trained)
    is_leased = experiences.c.state == State.LEASED
    values = {
        "state": case((is_leased, State.LEASED), else_=State.READY),
        "batch_id": case((is_leased, experiences.c.batch_id), else_=None),
        "teaches": experiences.c.teaches.bitwise_or(experiences.c.taught),
    }
    untrained = {"taught": 0, "last_signal": 0, "consumed_version": None}
    count = connection.execute(update(experiences).where(*trained).values(**values, **untrained)).rowcount
    credit_again(connection, scored, rule)
    return count


def _of_later(connection: Connection, to: int) -> tuple[ColumnElement[bool], ...]:
    """Rows that a version after `to` has consumed, and none that stays: not rejected, or `to` descends from it.

    An engine may have rejected a version whose trainer went on from its weights. Of rows that were trained on before
    the lineage was stored, only the first version is known, with the row.
    """
    line = select(versions.c.version, versions.c.parent).where(versions.c.version == to).cte("line", recursive=True)
    line = line.union(select(versions.c.version, versions.c.parent).join(line, versions.c.version == line.c.parent))
    rejected = versions.c.state == VersionState.REJECTED
    ancestors = connection.execute(
        select(versions.c.version).where(versions.c.version.in_(select(line.c.version)), rejected)
    )
    staying = select(versions.c.version).where(or_(~rejected, versions.c.version.in_(ancestors.scalars().all())))
    first = experiences.c.consumed_version
    consumed = select(lineage.c.version).where(lineage.c.experience_id == experiences.c.id, lineage.c.consumed)
    later = or_(first > to, consumed.where(lineage.c.version > to).exists())
    return first.not_in(staying), ~consumed.where(lineage.c.version.in_(staying)).exists(), later


def _return_trainers(connection: Connection, to: int, rejected: Sequence[int]) -> dict[str, bool]:
    """Set the rows of the trainers that continue from a later version: to the saved state of `to`, or to none.

    Returns their names, and whether there is such a state.
    """
    names = set(connection.execute(select(trainers.c.name).where(trainers.c.version > to)).scalars())
    for part in in_parts(versions.c.version, rejected):  # of versions that no saved state contains
        names |= set(
            connection.execute(select(versions.c.writer).where(part, versions.c.writer.is_not(None))).scalars()
        )
    found: dict[str, bool] = {}
    for name in sorted(names):
        own = (trainer_states.c.trainer == name, trainer_states.c.version == to)
        state = connection.execute(select(trainer_states).where(*own)).one_or_none()
        values = {"version": to, "step": 0, "state_path": None, "state_sha256": None}
        if state is not None:
            values |= {"step": state.step, "state_path": state.path, "state_sha256": state.sha256}
        rollbacks = trainers.c.rollbacks + 1
        changed = update(trainers).where(trainers.c.name == name).values(**values, rollbacks=rollbacks)
        if connection.execute(changed).rowcount:
            found[name] = state is not None
    return found


def lock_trainer(connection: Connection, name: str) -> None:
    """Lock a trainer's row until the transaction ends (PostgreSQL; on SQLite it has all locks)."""
    connection.execute(select(trainers.c.name).where(trainers.c.name == name).with_for_update())


def require_not_rolled_back(
    connection: Connection, *, trainer: str, rollbacks: int, start: int | None = None, lock: bool = True
) -> None:
    """Raise RolledBack if an operator has returned this trainer to an earlier version since it read its row.

    rollbacks: the number that it read; 0 without a row. start: the version that a trainer without a saved state begins
    with. lock: keep the trainer's row locked until the end of the transaction.
    """
    query = select(trainers.c.rollbacks, trainers.c.version).where(trainers.c.name == trainer)
    row = connection.execute(query.with_for_update() if lock else query).one_or_none()
    if row is not None and row.rollbacks != rollbacks:
        raise RolledBack(f"an operator has gone back to version {row.version}")
    if start is not None:
        here = select(versions.c.state).where(versions.c.version == start).with_for_update(read=True)
        if connection.execute(here).scalar() == VersionState.REJECTED:
            raise RolledBack(f"version {start} was rejected while this trainer started from it")
