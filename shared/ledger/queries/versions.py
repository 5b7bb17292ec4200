"""Versions, their rewards and their decisions."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, and_, case, func, or_, select

from shared.experience import MAY_SERVE, VersionState
from shared.ledger.queries.lease import LARGEST_REWARD
from shared.ledger.tables import experiences, versions

_NO_SQUARE = 1e-150  # PostgreSQL refuses to square a smaller number: the result would be rounded to 0
_REWARDED_ROWS = 10_000  # number of newest rows from which rewards by version are read
_MOST_NAMED = 20  # versions in an error message

PINNABLE = (*MAY_SERVE, VersionState.SKIPPED)
_KEPT = versions.c.deleted_at.is_(None)
_SKIPPED_BASE = and_(versions.c.version == 0, versions.c.state == VersionState.SKIPPED)  # by an earlier release
_MAY_SERVE = and_(_KEPT, or_(versions.c.state.in_(MAY_SERVE), _SKIPPED_BASE))
_SERVED = (VersionState.SERVING, VersionState.RETIRED)
_HAS_SERVED = and_(_MAY_SERVE, or_(versions.c.state.in_(_SERVED), versions.c.version == 0))


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A row of `versions`."""

    version: int
    parent: int | None
    kind: str
    path: str
    state: str
    reason: str | None
    step: int
    created_at: float
    served_at: float | None
    writer: str | None = None
    manifest_sha256: str | None = None
    bytes: int | None = None
    tag: str | None = None
    decided_at: float | None = None
    deleted_at: float | None = None
    share: float | None = None

    @property
    def has_files(self) -> bool:
        """Whether its folder is complete and not given up."""
        return self.state != VersionState.RESERVED and self.deleted_at is None

    @property
    def is_proven(self) -> bool:
        """Whether an engine has ever proven it. The base counts as proven: others are compared with it."""
        return self.served_at is not None or self.version == 0

    @property
    def has_served(self) -> bool:
        """Whether it has answered chats that name no version. The base counts, too."""
        return self.state in _SERVED or self.version == 0

    @property
    def may_serve(self) -> bool:
        """Whether engines may load it: published, not rejected, failed or skipped, and its files exist.

        The base may be loaded even if an earlier release has SKIPPED it.
        """
        skipped_base = self.version == 0 and self.state == VersionState.SKIPPED
        return (self.state in MAY_SERVE or skipped_base) and self.deleted_at is None

    @property
    def may_start_an_engine(self) -> bool:
        """Whether a process may start on it: its folder has all weights. Failed loads do not exclude the base."""
        failed_base = self.version == 0 and self.state == VersionState.FAILED and self.deleted_at is None
        return self.kind == "full" and (self.may_serve or failed_base)

    @property
    def may_be_pinned(self) -> bool:
        """Whether callers may have an engine serve it as an adapter, besides others."""
        return self.state in PINNABLE and self.deleted_at is None


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which versions should serve."""

    version: VersionRow | None  # for chats that name none; None: none may serve
    shares: dict[int, float]  # of these chats, by version, if an operator divided them among several; else empty


def list_versions(connection: Connection, *, before: int | None = None, at_most: int | None = None) -> list[VersionRow]:
    """Return all versions, oldest first, including numbers that are only reserved.

    before: only versions with smaller numbers. at_most: only the newest ones.
    """
    query = select(versions).order_by(versions.c.version.desc()).limit(at_most)
    if before is not None:
        query = query.where(versions.c.version < before)
    return [VersionRow(**row._mapping) for row in connection.execute(query)][::-1]


def kept_versions(connection: Connection) -> list[VersionRow]:
    """Return the versions whose files are not given up, oldest first, including numbers that are only reserved."""
    kept = select(versions).where(versions.c.deleted_at.is_(None)).order_by(versions.c.version)
    return [VersionRow(**row._mapping) for row in connection.execute(kept)]


def any_published(connection: Connection) -> bool:
    """Whether a version was ever published, in any state since."""
    published = select(versions.c.version).where(versions.c.state != VersionState.RESERVED).limit(1)
    return connection.execute(published).first() is not None


def find_versions(connection: Connection, numbers: Collection[int]) -> dict[int, VersionRow]:
    """Return the existing ones of these versions."""
    found = connection.execute(select(versions).where(versions.c.version.in_(numbers)))
    return {row.version: VersionRow(**row._mapping) for row in found}


def versions_on_disk(connection: Connection) -> list[int]:
    """Return the versions that have files and may be served, oldest first."""
    there = (versions.c.deleted_at.is_(None), versions.c.state.in_(PINNABLE))
    return list(connection.execute(select(versions.c.version).where(*there).order_by(versions.c.version)).scalars())


def shares_of_traffic(connection: Connection) -> dict[int, float]:
    """Return the shares that an operator gave to versions, by version."""
    shared = select(versions.c.version, versions.c.share).where(versions.c.share.is_not(None))
    return {row.version: row.share for row in connection.execute(shared.order_by(versions.c.version))}


def wanted_versions(connection: Connection) -> Wanted:
    """Return which versions should serve: those to which an operator gave shares, or else the newest that may serve.

    The version with the largest share leads, or, if that may not serve, the last one before it that has served. It also
    gets the shares of others that may not serve.
    """
    having_shares = select(versions).where(versions.c.share.is_not(None)).order_by(versions.c.version)
    shared = [VersionRow(**row._mapping) for row in connection.execute(having_shares)]
    if not shared:
        return Wanted(_last(connection, _MAY_SERVE), {})
    leading = max(shared, key=lambda row: (row.share, -row.version))
    first = leading if leading.may_serve else _last(connection, _HAS_SERVED, versions.c.version < leading.version)
    shares: dict[int, float] = {}
    for row in shared:
        version = first.version if first is not None and not row.may_be_pinned else row.version
        shares[version] = shares.get(version, 0.0) + (row.share or 0.0)
    return Wanted(first, shares if len(shares) > 1 else {})


def _last(connection: Connection, *which: ColumnElement[bool]) -> VersionRow | None:
    """Return the newest of the versions that meet the conditions."""
    row = connection.execute(select(versions).where(*which).order_by(versions.c.version.desc()).limit(1)).one_or_none()
    return None if row is None else VersionRow(**row._mapping)


def reason_against_serving(connection: Connection, version: int) -> str | None:
    """Return why no engine may load a version, also besides others; None: engines may."""
    row = find_versions(connection, [version]).get(version)
    if row is not None and row.may_be_pinned:
        return None
    available = f"on disk: {versions_on_disk(connection)[-_MOST_NAMED:] or 'none'}"
    if row is None:
        return f"version {version} does not exist; {available}"
    if row.state == VersionState.RESERVED:
        return f"version {version} is not published yet; {available}"
    if not row.has_files:
        return f"version {version} is not on disk any more; {available}"
    return f"version {version} is {row.state} and does not serve ({row.reason or ''}); {available}"


@dataclass(frozen=True, slots=True)
class Rewards:
    """The rewards of one version's replies, among the newest rows."""

    version: int
    count: int
    mean: float
    mean_square: float

    @property
    def standard_error(self) -> float | None:
        """Of the mean, as if the rows were independent; rows of one run usually are not. None for a single row."""
        variance = max(0.0, self.mean_square - self.mean**2)
        return math.sqrt(variance / (self.count - 1)) if self.count > 1 else None


def rewards_by_version(connection: Connection) -> list[Rewards]:
    """Return the rewards of the newest rows, trained on or not, by sampling version; oldest version first.

    A reply that two versions sampled says nothing about either, and one that no version of this ledger sampled nothing
    about any: their `version_end` is another than their version, and they are left out.
    Rewards that no row is trained on with are left out: their sums and squares may overflow.
    """
    newest = select(func.max(experiences.c.id)).scalar_subquery()
    reward = experiences.c.reward
    square = case((func.abs(reward) < _NO_SQUARE, 0.0), else_=reward * reward)
    query = select(experiences.c.version, func.count(), func.avg(reward), func.avg(square))
    usable = (reward.between(-LARGEST_REWARD, LARGEST_REWARD), experiences.c.version_end == experiences.c.version)
    rewarded = query.where(experiences.c.id > newest - _REWARDED_ROWS, *usable)
    grouped = rewarded.group_by(experiences.c.version).order_by(experiences.c.version)
    return [Rewards(*row) for row in connection.execute(grouped)]
