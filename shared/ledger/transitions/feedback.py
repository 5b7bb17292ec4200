"""3, feedback: append signals to the log, and compute the reward from them by the rule."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from sqlalchemy import Connection, select, update

from shared.config import RewardConfig
from shared.errors import TooManySignals
from shared.experience import State, choice_name
from shared.ledger import tables
from shared.ledger.conditions import MAX_PARAMETERS, AnyRow, are_about, in_parts
from shared.ledger.connect import COPY_ROWS, copy_rows, database_time, placeholder, plan_by_values
from shared.ledger.queries.signals import load_signals
from shared.ledger.queries.targets import Targets, find_targets
from shared.ledger.tables import experiences
from shared.reward import (
    EVERY_LESSON,
    SCORES,
    WORDS,
    Credit,
    Kind,
    Lesson,
    NewWords,
    Scope,
    Signal,
    credit_of,
    lessons_of,
)

_REWARD = int(Lesson.REWARD)
MAX_SIGNALS = 500  # about one row; all of them are read for each further signal
_CREDIT = tuple(field.name for field in fields(Credit))  # fields that are columns
_of_credit = operator.attrgetter(*_CREDIT)
_rewards = operator.attrgetter("reward", "turn_reward", "outcome")
_COLUMNS = ("id", "msg_id", "choice", "task_id", "run_id", "state", "acts", "taught", "last_signal", *_CREDIT)
_LOGGED = ("msg_id", "choice", "kind", "name", "value", "text", "scope", "key_name", "created_at")
# SQLite would reuse the ids of deleted signals, but a batch compares ids with its last one
_NEXT_NUMBER = """SELECT 1 + max(coalesce((SELECT max(id) FROM signals), 0),
    coalesce((SELECT last_signal FROM batches ORDER BY id DESC LIMIT 1), 0))"""
_UNTRAINED = (State.RECORDED, State.READY)
_MANY = 50  # number of targets from which statements are planned anew
ReceiptState = Literal["applied", "updated", "duplicate", "unknown", "already_trained", "expired"]


@dataclass(frozen=True, slots=True)
class Receipt:
    """The result of feedback for one target, as the caller named it."""

    msg_id: str
    state: ReceiptState


def apply_feedback(
    connection: Connection,
    *,
    msg_ids: Sequence[str],
    task_id: str | None,
    run_id: str | None,
    signals: Sequence[Signal],
    rule: RewardConfig,
    learned: frozenset[Kind] = SCORES,
    key_name: str | None = None,
    key_group: str | None = None,
    conversations: bool = False,
    scope: Scope | None = None,
) -> list[Receipt]:
    """Find the targets, as `find_targets` does, and apply feedback to all of them in this transaction.

    With both `msg_ids` and a task, rows whose chat named no task or run get these, for callers whose chats name none.
    Returns one receipt for each given id, and for each message found by task, run or conversation; an unknown id is
    `unknown`. Raises TooManySignals.
    """
    asked: dict[str, Any] = {"msg_ids": msg_ids, "task_id": task_id, "run_id": run_id}
    targets = find_targets(connection, **asked, key_group=key_group, conversations=conversations, scope=scope)
    feedback = GivenFeedback(signals, rule, learned, key_name, task_id, run_id, frozenset(msg_ids), conversations)
    return apply_to(connection, targets, feedback)


@dataclass(frozen=True, slots=True)
class GivenFeedback:
    """The feedback in one request."""

    signals: Sequence[Signal]
    rule: RewardConfig
    learned: frozenset[Kind]  # the kinds of signals that are learned from
    key_name: str | None = None
    task_id: str | None = None  # for rows in `named` whose chat named none
    run_id: str | None = None
    named: frozenset[str] = frozenset()  # names of these rows
    conversations: bool = False  # the other turns of their conversations are such rows, too


def apply_to(connection: Connection, targets: Targets, feedback: GivenFeedback) -> list[Receipt]:
    """Append signals to the log of every target, and set the credit by the rule if it can still be trained on.

    The number of statements does not depend on the number of targets. Rows are locked in the order of their ids, so
    that two transactions that lock the same rows do not deadlock. Raises TooManySignals; the caller must roll back.
    """
    if len(targets) > _MANY:
        plan_by_values(connection)
    scopes = {row.id: row.scope for reached in targets.values() for row in reached}
    rows = {row.id: row for row in _lock(connection, sorted(scopes))}
    of = {name: [rows[row.id] for row in reached if row.id in rows] for name, reached in targets.items()}
    _attribute(connection, [row for name in of if _is_named(name, feedback) for row in of[name]], feedback)
    applied = _Application(feedback, scopes, load_signals(connection, list(rows.values())), database_time(connection))
    receipts = [Receipt(name, applied.to(found)) for name, found in of.items()]
    _append(connection, applied.logged)
    changed: dict[tuple[Credit, bool], list[int]] = {}
    for row_id, credit in applied.credits.items():
        row, before = rows[row_id], _credit(rows[row_id])
        rewards = credit.teaches & ~_given(row) & _REWARD
        if credit != before:
            is_kept = bool(rewards) and _rewards(credit) == _rewards(before)
            changed.setdefault((credit, is_kept), []).append(row_id)
    for (credit, is_kept), ids in changed.items():  # a comment does not make another key's reward one's own
        _set_credit(connection, ids, credit, **({} if is_kept else {"feedback_key": feedback.key_name}))
    return receipts


def _is_named(name: str, feedback: GivenFeedback) -> bool:
    """Whether the caller named this target, or a message of its conversation together with the conversation."""
    return name in feedback.named or (feedback.conversations and bool(feedback.named))


def _lock(connection: Connection, ids: Sequence[int]) -> Iterable[AnyRow]:
    query = select(*(experiences.c[name] for name in _COLUMNS)).order_by(experiences.c.id).with_for_update()
    for mine in in_parts(experiences.c.id, ids):
        yield from connection.execute(query.where(mine))


def _attribute(connection: Connection, rows: Sequence[AnyRow], feedback: GivenFeedback) -> None:
    for column, value in ((experiences.c.task_id, feedback.task_id), (experiences.c.run_id, feedback.run_id)):
        ids = [row.id for row in rows if value is not None and row._mapping[column.name] is None]
        for mine in in_parts(experiences.c.id, ids):
            connection.execute(update(experiences).where(mine, column.is_(None)).values({column: value}))


class _Application:
    """The changes by feedback, target by target; a row may belong to several targets."""

    def __init__(
        self, feedback: GivenFeedback, scopes: dict[int, Scope], log: dict[tuple[str, int], list[Signal]], now: float
    ) -> None:
        self._feedback = feedback
        self._scopes = scopes  # by row id
        self._log = log
        self._now = now
        by = feedback.key_name
        self._signals: dict[Scope, list[Signal]] = {
            scope: [replace(signal, scope=scope, key_name=by) for signal in feedback.signals]
            for scope in set(scopes.values())
        }
        self.logged: list[tuple[Any, ...]] = []  # values of _LOGGED
        self.credits: dict[int, Credit] = {}  # by row id

    def to(self, rows: Sequence[AnyRow]) -> ReceiptState:
        """Apply the feedback to one target's rows."""
        if not rows:
            return "unknown"
        open_rows = [row for row in rows if self._may_act(row)]
        before = {row.id: self.credits.get(row.id) or _credit(row) for row in open_rows}
        repeats = bool(open_rows) and all(_repeats(self._log_of(row), self._signals_about(row)) for row in rows)
        # credits differ if a signal arrived while a trainer had leased a row
        if repeats and before == self._current_credits(open_rows):
            return "duplicate"
        for row in rows:
            self._append(row)
        if not open_rows:
            return "expired" if all(row.state == State.DISCARDED for row in rows) else "already_trained"
        now = self._current_credits(open_rows)
        self.credits |= now
        was_rewarded = any(credit.reward is not None for credit in before.values())
        is_changed = any(_rewards(now[row.id]) != _rewards(before[row.id]) for row in open_rows)
        return "updated" if is_changed and was_rewarded else "applied"

    def _may_act(self, row: AnyRow) -> bool:
        """Whether the row can still be trained on some of the feedback."""
        found = self._signals_about(row)
        lessons = lessons_of(one.kind for one in found if one.kind not in WORDS) & ~_given(row)
        if row.taught != EVERY_LESSON:  # not erased
            words = NewWords(row.taught, row.last_signal, self._log_of(row))
            new = [one.kind for one in found if words.has(one)]
            waits = lessons_of(one.kind for one in found if one.kind in WORDS) & ~_given(row)
            lessons |= lessons_of(new) | (waits if row.state in _UNTRAINED else waits & row.teaches)
        if row.state not in _UNTRAINED:  # it is trained on again only for signals that are learned from
            lessons &= lessons_of(self._feedback.learned)
        return row.state != State.DISCARDED and lessons != 0

    def _current_credits(self, rows: Sequence[AnyRow]) -> dict[int, Credit]:
        return {row.id: _credit_by(self._log_of(row), row, self._feedback.rule, self._feedback.learned) for row in rows}

    def _log_of(self, row: AnyRow) -> list[Signal]:
        return self._log[row.msg_id, row.choice]

    def _signals_about(self, row: AnyRow) -> list[Signal]:
        return self._signals[self._scopes[row.id]]

    def _append(self, row: AnyRow) -> None:
        log, signals = self._log_of(row), self._signals_about(row)
        if len(log) + len(signals) > MAX_SIGNALS:
            name = choice_name(row.msg_id, row.choice)
            raise TooManySignals(
                f"{name} has {len(log)} signals already, and may have {MAX_SIGNALS}; send no more for it"
            )
        log += signals
        by = (self._feedback.key_name, self._now)
        self.logged += [(row.msg_id, row.choice, s.kind, s.name, s.value, s.text, s.scope, *by) for s in signals]


def _given(row: AnyRow) -> int:
    """Return the lessons that the row was trained on, or that a trainer has claimed: nothing is added to those."""
    given: int = row.taught | (row.acts if row.state == State.LEASED else 0)
    return given


def _credit_by(log: Sequence[Signal], row: AnyRow, rule: RewardConfig, learned: frozenset[Kind]) -> Credit:
    """Return the credit of a row from its log; rewards that it was trained on do not change."""
    credit = credit_of(log, rule, learned, row.taught, row.last_signal)
    if not _given(row) & _REWARD:
        return credit
    teaches = (credit.teaches & ~_REWARD) | (row.teaches & _REWARD)
    return replace(_credit(row), teaches=teaches)


def _credit(row: AnyRow) -> Credit:
    return Credit(*_of_credit(row))


def _append(connection: Connection, rows: Sequence[tuple[Any, ...]]) -> None:
    """Append to the log of signals."""
    if not rows:
        return
    names: Sequence[str] = _LOGGED
    if connection.dialect.name == "sqlite":
        first = connection.exec_driver_sql(_NEXT_NUMBER).scalar_one()
        names, rows = ("id", *_LOGGED), [(number, *row) for number, row in enumerate(rows, first)]
    columns, mark = ", ".join(names), placeholder(connection)
    if connection.dialect.name == "postgresql" and len(rows) >= COPY_ROWS:
        copy_rows(connection, f"COPY {tables.signals.name} ({columns}) FROM STDIN", rows)
        return
    marks = ", ".join([mark] * len(names))
    connection.exec_driver_sql(f"INSERT INTO {tables.signals.name} ({columns}) VALUES ({marks})", list(rows))


def _repeats(log: list[Signal], signals: Sequence[Signal]) -> bool:
    """Whether each of the signals equals the last one in the log that it would replace."""
    last = {_place(signal): signal for signal in log}
    return all(last.get(_place(signal)) == signal for signal in signals)


def _place(signal: Signal) -> tuple[str, str | None, bool, str | None]:
    """Return a key by which a later signal replaces an earlier one.

    Each reply in `preferred_over` has its own, and so have the words of each key that sends feedback.
    """
    about = signal.text if signal.kind == "preferred_over" else signal.name
    return signal.kind, about, signal.scope == "message", signal.key_name if signal.kind in WORDS else None


def _set_credit(connection: Connection, ids: Sequence[int], credit: Credit, **more: str | None) -> None:
    values = {**asdict(credit), **more}
    for mine in in_parts(experiences.c.id, ids):
        still_open = experiences.c.state != State.DISCARDED
        connection.execute(update(experiences).where(mine, still_open).values(values))


def recompute_rewards(
    connection: Connection, rule: RewardConfig, learned: frozenset[Kind], after_id: int = 0
) -> tuple[int, int | None]:
    """Apply the rule and the learned kinds to some of the rows that have signals and are not leased yet.

    after_id: where the previous call ended. Returns (rows changed, where the next call starts; None at the end).
    """
    about = select(tables.signals.c.id).where(are_about())
    columns = (experiences.c[name] for name in _COLUMNS)
    mine = (experiences.c.id > after_id, experiences.c.state.in_(_UNTRAINED), about.exists())
    query = select(*columns).where(*mine).order_by(experiences.c.id).limit(MAX_PARAMETERS)
    rows = list(connection.execute(query.with_for_update()))
    log = load_signals(connection, rows)
    changed: dict[Credit, list[int]] = {}
    for row in rows:
        credit = _credit_by(log[row.msg_id, row.choice], row, rule, learned)
        if credit != _credit(row):
            changed.setdefault(credit, []).append(row.id)
    for credit, ids in changed.items():
        _set_credit(connection, ids, credit)
    return sum(map(len, changed.values())), rows[-1].id if len(rows) == MAX_PARAMETERS else None
