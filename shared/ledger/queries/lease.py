"""The rows that a trainer has leased, and those that it may lease next."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import fields, replace
from operator import attrgetter

from sqlalchemy import Connection, func, select, text

from shared.experience import (
    BatchState,
    CorruptTokens,
    Experience,
    Lease,
    Sampling,
    State,
    Tokens,
    TrajectoryKey,
    choice_name,
    trajectory_key,
)
from shared.ledger.conditions import AnyRow, in_trajectories, is_in, is_ready, need_not_wait, split_name
from shared.ledger.connect import database_time
from shared.ledger.prefix import load_tokens
from shared.ledger.queries.preferences import with_preferences
from shared.ledger.queries.signals import load_signals
from shared.ledger.tables import IS_QUARANTINED, batches, experiences
from shared.reward import WORDS, Kind, Lesson, NewWords, Signal, has_effect, identity_of, lessons_of

DEATHS_TOLERATED = 4  # in updates with the same rows before they are blamed: machines fail, operators kill processes
_REASONS = 20  # maximum number in the status
LARGEST_REWARD = 1e6  # the square of a larger one, a critic's loss, may overflow in float32
_HELD = select(
    *(experiences.c[name] for name in ("id", "msg_id", "choice", "parent_id", "n_prompt")),
    *(experiences.c[name] for name in ("task_id", "run_id", "key_group", "conversation_id")),
    *(experiences.c[name] for name in ("teaches", "taught", "outcome", "failures", "deaths")),
)
_COLUMNS = [field.name for field in fields(Experience) if field.name in experiences.c]
_sampling_of = attrgetter(*(field.name for field in fields(Sampling)))


def load_lease(
    connection: Connection,
    batch_id: int,
    vocabulary: int | None = None,
    kinds: Collection[Kind] = (),
    max_tokens: int | None = None,
    metrics: Collection[str] | None = None,
) -> Lease:
    """Return the rows of a batch, oldest first, and rows that cannot be trained on, with the reason.

    vocabulary: number of token ids of the model; max_tokens: of prompt and reply; None: not checked. kinds: of the
    signals to load; only those that act in this batch are returned. metrics: names of those with a weight; the others
    set no reward, and are not returned; None: all.
    """
    held = select(experiences).where(experiences.c.batch_id == batch_id, is_in(experiences.c.state, State.LEASED))
    rows = connection.execute(held.order_by(experiences.c.id)).all()
    acts = {row.id: row.acts for row in rows}
    until = connection.execute(select(batches.c.last_signal).where(batches.c.id == batch_id)).scalar()
    lease = Lease(batch_id, *load_rows(connection, rows, acts, vocabulary, kinds, max_tokens, until, metrics))
    if "preferred_over" not in kinds:
        return lease
    return replace(lease, rows=with_preferences(connection, lease.rows, vocabulary, max_tokens))


def load_rows(
    connection: Connection,
    rows: Sequence[AnyRow],
    acts: Mapping[int, int],
    vocabulary: int | None,
    kinds: Collection[Kind],
    max_tokens: int | None,
    until: int | None = None,
    metrics: Collection[str] | None = None,
) -> tuple[list[Experience], dict[int, str]]:
    """Return rows with their tokens and with the lessons that act on each, by id; and why others cannot be trained on.

    until: the last signal that acts; of words, only those that have not acted before. None: all signals. metrics: see
    `load_lease`.
    """
    loaded = load_tokens(connection, [row.id for row in rows])
    logs = load_signals(connection, rows, kinds) if kinds else {}
    found: list[Experience] = []
    corrupt: dict[int, str] = {}
    for row in rows:
        columns = {**{name: row._mapping[name] for name in _COLUMNS}, "acts": acts[row.id]}
        columns["conversation_id"] = row.conversation_id or choice_name(row.msg_id, row.choice)
        if not acts[row.id] & Lesson.REWARD:
            columns["outcome"] = None
        log = [one for one in logs.get((row.msg_id, row.choice), ()) if metrics is None or has_effect(one, metrics)]
        acting = _acting(log, row, acts[row.id], until)
        try:
            tokens, sampling = _check(loaded.get(row.id), vocabulary, max_tokens), Sampling(*_sampling_of(row))
            sampling.check()
            check_rewards(row.reward, row.turn_reward, row.outcome)
        except CorruptTokens as exc:
            corrupt[row.id] = str(exc)
            continue
        found.append(Experience(**columns, tokens=tokens, sampling=sampling, signals=acting))
    return found, corrupt


def _acting(log: Sequence[Signal], row: AnyRow, acts: int, until: int | None) -> tuple[Signal, ...]:
    """Return the signals that act on a row, oldest first. Words that were said again count as said last.

    The same words of a row and of a whole that it belongs to are two signals, as long as they have not acted.
    """
    words = NewWords(row.taught, row.last_signal)
    acting: dict[Hashable, Signal] = {}
    for place, signal in enumerate(log):
        is_new = words.has(signal)
        if not lessons_of([signal.kind]) & acts:
            continue
        if until is not None and (signal.id is None or signal.id > until):
            continue
        if until is None or signal.kind not in WORDS:
            acting[place] = signal
        else:
            said = identity_of(signal)
            if is_new or (said, True) in acting or (said, False) in acting:
                acting.pop((said, signal.scope == "message"), None)
                acting[said, signal.scope == "message"] = signal
    return tuple(acting.values())


def check_rewards(*rewards: float | None) -> None:
    """Raise CorruptTokens for a reward that cannot be trained on."""
    for reward in rewards:
        if reward is not None and not abs(reward) <= LARGEST_REWARD:
            raise CorruptTokens(f"reward {reward} is beyond ±{LARGEST_REWARD:g}: its square would be no number")


def _check(tokens: Tokens | CorruptTokens | None, vocabulary: int | None, max_tokens: int | None) -> Tokens:
    """Return tokens that can be trained on. Raises CorruptTokens."""
    if tokens is None:
        raise CorruptTokens("its tokens were erased")
    if isinstance(tokens, CorruptTokens):
        raise tokens
    tokens.check(vocabulary, max_tokens)
    return tokens


def held_rows(connection: Connection, batch_id: int) -> Sequence[AnyRow]:
    """Return a batch's rows: their names, signals, failures and deaths."""
    held = (experiences.c.batch_id == batch_id, is_in(experiences.c.state, State.LEASED))
    return connection.execute(_HELD.where(*held)).all()


def other_turns(connection: Connection, rows: Sequence[AnyRow]) -> list[AnyRow]:
    """Return the other rows of trajectories of which `rows` lacks a turn that another one continues."""
    names = {choice_name(row.msg_id, row.choice) for row in rows}
    cut = {trajectory_key(row) for row in rows if row.parent_id is not None and row.parent_id not in names}
    known = {row.id for row in rows}
    found = (row for mine in in_trajectories(cut) for row in connection.execute(_HELD.where(mine)))
    return [row for row in found if row.id not in known]


def rewarded_rows(
    taught: Collection[tuple[AnyRow | Experience, int]],
    prompts_of: Callable[[Sequence[AnyRow | Experience]], Mapping[int, bytes]],
) -> set[int]:
    """Return the ids of the rows on which a reward acts: their own, one of a turn that they led to, or of a whole.

    taught: rows with their lessons; 0 for turns that are only to show which others they link. A turn leads to all later
    turns of its trajectory, except those that continue another answer to the same messages: another choice, or another
    try. prompts_of: the prompts of first turns, by id; may be absent for a prompt that no other one equals.
    """
    by_trajectory: dict[TrajectoryKey, list[tuple[AnyRow | Experience, int]]] = defaultdict(list)
    for row, teaches in taught:
        by_trajectory[trajectory_key(row)].append((row, teaches))
    found: set[int] = set()
    for of in by_trajectory.values():
        rewarded = [row for row, teaches in of if teaches & Lesson.REWARD]
        if any(row.outcome is not None for row in rewarded):
            found |= {row.id for row, _ in of}
        elif rewarded:
            found |= _led_to(rewarded, sorted((row for row, _ in of), key=lambda row: row.id), prompts_of)
    return found


def _led_to(
    rewarded: Sequence[AnyRow | Experience],
    rows: Sequence[AnyRow | Experience],
    prompts_of: Callable[[Sequence[AnyRow | Experience]], Mapping[int, bytes]],
) -> set[int]:
    """Return the ids of the rewarded rows, and of those that led to them. rows: of the trajectory, by id."""
    by_name = {choice_name(row.msg_id, row.choice): row for row in rows}
    named = {row.id: by_name.get(row.parent_id or "") for row in rows}
    parents = {row_id: None if one is None or one.id >= row_id else one for row_id, one in named.items()}
    first = [row for row in rows if parents[row.id] is None]
    prompts = prompts_of(first) if len(first) > 1 else {}
    trees: dict[int, str | bytes] = {}  # by id: the name of the tree of linked turns, or of tries
    for row in rows:
        parent = parents[row.id]
        if parent is not None:
            trees[row.id] = trees[parent.id]
        elif row.parent_id is not None:
            trees[row.id] = split_name(row.parent_id)[0]
        else:
            trees[row.id] = prompts.get(row.id, row.msg_id)
    found: set[int] = set()
    last: dict[str | bytes, int] = {}  # by tree: the last rewarded row
    for row in rewarded:
        last[trees[row.id]] = max(row.id, last.get(trees[row.id], 0))
        before: AnyRow | Experience | None = row
        while before is not None and before.id not in found:
            found.add(before.id)
            before = parents[before.id]
    return found | {
        row.id for row in rows if any(row.id < last_id for tree, last_id in last.items() if tree != trees[row.id])
    }


def equal_prompts(connection: Connection, rows: Sequence[AnyRow]) -> dict[int, bytes]:
    """Return the prompts of rows whose prompt has as many tokens as another one's, by id."""
    lengths = Counter(row.n_prompt for row in rows)
    tokens = load_tokens(connection, [row.id for row in rows if lengths[row.n_prompt] > 1])
    return {row_id: one.prompt_ids.tobytes() for row_id, one in tokens.items() if isinstance(one, Tokens)}


def is_to_blame(rows: Sequence[AnyRow]) -> bool:
    """Whether these rows are blamed for a failed update: they are one trajectory, and failed before."""
    return len({trajectory_key(row) for row in rows}) == 1 and all(row.failures >= 1 for row in rows)


def is_leased(connection: Connection, batch_id: int, owner: str) -> bool:
    """Whether this trainer has leased this batch."""
    mine = (batches.c.id == batch_id, batches.c.owner == owner, is_in(batches.c.state, BatchState.LEASED))
    return connection.execute(select(batches.c.id).where(*mine)).first() is not None


def deaths_will_be_blamed(connection: Connection, owner: str) -> bool:
    """Whether this trainer died in an update too often, so that a release of the batch counts as a failure."""
    died = (batches.c.owner == owner, batches.c.state == BatchState.LEASED, batches.c.updating)
    held = (experiences.c.batch_id == batches.c.id, is_in(experiences.c.state, State.LEASED))
    often = select(experiences.c.id).where(*died, *held, experiences.c.deaths >= DEATHS_TOLERATED)
    return connection.execute(often.limit(1)).first() is not None


def failures_of_oldest(
    connection: Connection, after_id: int = 0, *, runs_of_task: int = 1, wait_s: float | None = None
) -> int:
    """Return the number of failed updates of the oldest row that a trainer may claim; 0 if there is none.

    runs_of_task, wait_s: as in `transitions.claim`.
    """
    quiet_since = None if wait_s is None else database_time(connection) - wait_s
    may_be_claimed = (*is_ready(after_id), *need_not_wait(runs_of_task, quiet_since))
    oldest = select(experiences.c.failures).where(*may_be_claimed).order_by(experiences.c.id).limit(1)
    return int(connection.execute(oldest).scalar() or 0)


def quarantined(connection: Connection) -> dict[str, int]:
    """Return the most frequent reasons for quarantine with the number of rows, and the number of all other rows."""
    number = func.count()
    columns = (experiences.c.reason, number, func.sum(number).over())  # the last: of all reasons
    reasons = select(*columns).where(text(IS_QUARANTINED)).group_by(experiences.c.reason)
    rows = connection.execute(reasons.order_by(number.desc(), experiences.c.reason).limit(_REASONS)).all()
    counted: dict[str, int] = {reason: count for reason, count, _ in rows}
    others = int(rows[0][2]) - sum(counted.values()) if rows else 0
    return {**counted, "quarantined: other reasons": others} if others else counted


def any_lease_expired(connection: Connection) -> bool:
    """Whether any trainer's lease has expired."""
    leased = (batches.c.state == BatchState.LEASED, batches.c.lease_until < database_time(connection))
    return connection.execute(select(batches.c.id).where(*leased).limit(1)).first() is not None
