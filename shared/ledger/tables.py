"""The ledger's tables. Polled rows are narrow; token arrays and texts are in a table of their own, `payloads`.

The columns of `experiences` are declared once, here: stage record, the lease and the export derive their lists from it.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from shared.experience import BatchState, State

metadata = MetaData()

Id = BigInteger().with_variant(Integer, "sqlite")  # SQLite's rowid is an INTEGER
# conditions of indexes; a query repeats them word for word, as text()
WAITS = f"teaches <> 0 AND state IN ('{State.RECORDED}', '{State.CONSUMED}')"  # a commit makes the row READY
REHEARSABLE = "(taught & 22) <> 0"  # Lesson.COMMENT, CORRECTION, DEMONSTRATION: trained on words or written answers
IS_READY = f"coalesce(state, '') = '{State.READY}'"  # as conditions.is_in() writes it
IS_QUARANTINED = "substr(reason, 1, 12) = 'quarantined:'"
_EXPORTED = {"exported": True}  # info of a column that `flywheel export` writes

experiences = Table(
    "experiences",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),  # in the order of recording
    Column("msg_id", String(200), nullable=False, info=_EXPORTED),
    Column("choice", Integer, nullable=False, info=_EXPORTED),
    Column("parent_id", String(220), info=_EXPORTED),  # choice_name() of the exchange that this one continues
    Column("conversation_id", String(220), info=_EXPORTED),  # its conversation's first exchange; null: it is alone
    Column("exchange", LargeBinary),  # digest of all messages up to and including the reply; a later turn continues it
    Column("task_id", String(400), info=_EXPORTED),
    Column("run_id", String(400), info=_EXPORTED),
    Column("key_name", String(200), info=_EXPORTED),  # the key that sent the chat
    Column("key_group", String(200), info=_EXPORTED),  # of the keys whose feedback may reach it; null: without a group
    Column("feedback_key", String(200)),  # the key that last set the reward; without one to act, that of the words
    Column("version", Integer, nullable=False, info=_EXPORTED),  # the version that sampled the first token
    Column("version_end", Integer, nullable=False),  # the version that sampled the last token
    Column("state", String(12), nullable=False, info=_EXPORTED),  # State
    Column("reason", Text, info=_EXPORTED),  # why DISCARDED
    Column("reward", Float, info=_EXPORTED),  # from the signals so far: the latest of the next two
    Column("turn_reward", Float, info=_EXPORTED),  # its own
    Column("outcome", Float, info=_EXPORTED),  # of the whole that it belongs to; counts once in training
    # shared.reward.Lesson: what was said that is learned from, what of it acts in its batch, what it was trained on
    Column("teaches", Integer, nullable=False, server_default=text("0")),
    Column("acts", Integer, nullable=False, server_default=text("0")),
    Column("taught", Integer, nullable=False, server_default=text("0")),
    Column("last_signal", BigInteger, nullable=False, server_default=text("0")),  # the last signal in the log by then
    Column("batch_id", Id),  # its current or last batch; no foreign key: see migrations, 0005
    Column("consumed_version", Integer, info=_EXPORTED),  # the first version that was trained on it
    Column("failures", Integer, nullable=False, server_default=text("0")),  # number of failed updates with it
    Column("deaths", Integer, nullable=False, server_default=text("0")),  # of trainers during an update with it
    Column("n_prompt", Integer, nullable=False),  # tokens
    Column("n_reply", Integer, nullable=False),  # tokens
    Column("temperature", Float, nullable=False),
    Column("top_p", Float, nullable=False),
    Column("top_k", Integer, nullable=False),
    Column("min_p", Float, nullable=False),
    Column("repetition_penalty", Float, nullable=False, server_default=text("1")),
    Column("presence_penalty", Float, nullable=False, server_default=text("0")),
    Column("frequency_penalty", Float, nullable=False, server_default=text("0")),
    Column("masked", Boolean, nullable=False, server_default=text("false")),  # shared.experience.Sampling
    Column("finish_reason", String(40), info=_EXPORTED),
    Column("latency_s", Float),
    Column("created_at", Float, nullable=False, info=_EXPORTED),  # Unix seconds
    UniqueConstraint("msg_id", "choice", name="uq_experiences_message"),
)


def _partial_index(name: str, where: str, *columns: Column[Any]) -> None:
    """Create a partial index of only the rows that are searched by it."""
    Index(f"ix_{columns[0].table.name}_{name}", *columns, sqlite_where=text(where), postgresql_where=text(where))


for _state in (State.RECORDED, State.READY, State.LEASED):
    _partial_index(_state.lower(), f"state = '{_state}'", experiences.c.id)
_partial_index("teaching", WAITS, experiences.c.id)
_partial_index("rehearsable", REHEARSABLE, experiences.c.id)
_partial_index("quarantined", IS_QUARANTINED, experiences.c.id)
_partial_index("task", "task_id IS NOT NULL", experiences.c.task_id, experiences.c.run_id)
_partial_index("task_ready", f"{IS_READY} AND task_id IS NOT NULL", experiences.c.task_id, experiences.c.run_id)
_partial_index("batch", "batch_id IS NOT NULL", experiences.c.batch_id)
_partial_index("parent", "parent_id IS NOT NULL", experiences.c.parent_id)
_partial_index("conversation", "conversation_id IS NOT NULL", experiences.c.conversation_id)
Index("ix_experiences_exchange", experiences.c.exchange)

payloads = Table(
    "payloads",
    metadata,
    Column(
        "experience_id", Id, ForeignKey("experiences.id", ondelete="CASCADE"), primary_key=True, autoincrement=False
    ),
    Column("tokens", LargeBinary, nullable=False),  # shared.experience.Tokens.encode
    Column("request", LargeBinary),  # JSON
    Column("reply", LargeBinary),  # JSON
    Column("prefix_of", Id),  # the experience whose tokens its prompt begins with, and omits: prefix.py
)
_partial_index("prefix", "prefix_of IS NOT NULL", payloads.c.prefix_of)

signals = Table(
    "signals",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("msg_id", String(200), nullable=False),
    Column("choice", Integer, nullable=False),
    Column("kind", String(20), nullable=False),  # shared.reward.Kind
    Column("name", String(200)),  # a metric's name
    Column("value", Float),
    Column("text", Text),
    Column("scope", String(12), nullable=False, server_default=text("'message'")),  # shared.reward.Scope
    Column("key_name", String(200)),
    Column("created_at", Float, nullable=False),
)
Index("ix_signals_message", signals.c.msg_id, signals.c.choice)

idempotency = Table(
    "idempotency",
    metadata,
    Column("key", String(400), primary_key=True),
    Column("body", LargeBinary, nullable=False),  # SHA-256 of the request
    Column("response", LargeBinary, nullable=False),
    Column("created_at", Float, nullable=False),
)

versions = Table(
    "versions",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("parent", Integer),
    Column("kind", String(8), nullable=False),
    Column("path", Text, nullable=False),  # relative to root_dir
    Column("state", String(12), nullable=False),  # VersionState
    Column("reason", Text),  # why SKIPPED, REJECTED or FAILED
    Column("step", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("served_at", Float),  # time of its first service
    Column("writer", String(200)),  # the trainer that reserved the number; null: the base model
    Column("manifest_sha256", String(64)),  # of MANIFEST.json; null if an older Flywheel published it
    Column("bytes", BigInteger),  # of all its files; null likewise
    Column("tag", String(200)),  # an operator's name for it; tagged versions are kept
    Column("decided_at", Float),  # time of its last change of state
    Column("deleted_at", Float),  # time since which its files are deleted, or about to be
    Column("share", Float),  # of the chats that name no version, given by an operator; null: none
)
_partial_index("kept", "deleted_at IS NULL", versions.c.version)
_partial_index("shared", "share IS NOT NULL", versions.c.version)

decisions = Table(  # append-only
    "decisions",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("version", Integer, nullable=False),
    Column("from_state", String(12)),  # VersionState; null for the first decision
    Column("to_state", String(12), nullable=False),  # VersionState
    Column("reason", Text),
    Column("decided_by", String(200), nullable=False),  # a trainer, an engine, an operator
    Column("decided_at", Float, nullable=False),  # Unix seconds
)
Index("ix_decisions_version", decisions.c.version, decisions.c.id)

version_leases = Table(
    "version_leases",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("reader", String(400), primary_key=True),  # reader of the version's files
    Column("purpose", String(12), primary_key=True),  # Purpose
    Column("owner", String(200), nullable=False),  # process that renews the lease
    Column("until", Float, nullable=False),  # Unix seconds
)

batches = Table(
    "batches",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("owner", String(200), nullable=False),
    Column("state", String(12), nullable=False),  # BatchState
    Column("lease_until", Float, nullable=False),  # Unix seconds
    Column("consumed_version", Integer),
    Column("updating", Boolean, nullable=False, server_default=text("false")),  # an update with it has begun
    Column("last_signal", BigInteger, nullable=False, server_default=text("0")),  # the last signal when it was claimed
    Column("created_at", Float, nullable=False),
)
_partial_index("leased", f"state = '{BatchState.LEASED}'", batches.c.owner)
experiences.add_is_dependent_on(batches)  # copy order: SQLite still has the foreign key

trainers = Table(
    "trainers",
    metadata,
    Column("name", String(200), primary_key=True),
    Column("step", Integer, nullable=False),  # updates that the saved state contains
    Column("version", Integer, nullable=False),  # version of the saved state
    Column("state_path", Text),  # relative to root_dir; null before the first save
    Column("state_sha256", String(64)),  # of the saved state's files; null if an older Flywheel saved it
    Column("trouble", Text),  # why it cannot publish
    Column("tripped", LargeBinary),  # JSON: the bound of its breaker that was crossed, until an operator resumes it
    Column("resumed_version", Integer),  # newest version when last resumed: the breaker compares later ones
    Column("chosen", LargeBinary),  # JSON: with `algorithm: auto`, the algorithms in use with their weights
    Column("stats", LargeBinary),  # JSON: figures of the last update
    Column("rollbacks", Integer, nullable=False, server_default=text("0")),  # returns to an earlier version
    Column("alive", Boolean, nullable=False, server_default=text("true")),
    Column("heartbeat_at", Float, nullable=False),
)

trainer_states = Table(  # saved states that a trainer keeps, besides the one in its row
    "trainer_states",
    metadata,
    Column("trainer", String(200), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("path", Text, nullable=False),  # relative to root_dir
    Column("sha256", String(64)),
    Column("step", Integer, nullable=False),
)

explorers = Table(
    "explorers",
    metadata,
    Column("id", String(64), primary_key=True),  # new at each start
    Column("acknowledged", LargeBinary, nullable=False),  # JSON: shared.ledger.queries.Followed by engine
    Column("settings", LargeBinary),  # JSON: settings in which all explorers must agree, by their keys
    Column("heartbeat_at", Float, nullable=False),
)

engines = Table(
    "engines",
    metadata,
    Column("url", String(400), primary_key=True),  # for a loopback address, prefixed with the machine's name
    Column("owner", String(64)),  # the explorer that changes its version
    Column("owner_until", Float, nullable=False),  # Unix seconds
    Column("state", String(12), nullable=False),  # as explorer_service.engines.engine.EngineState
    Column("version", Integer),
    Column("generation", Integer, nullable=False),  # number of changes of its state
    # the generation in which requests in flight were last sampled by weights that failed their proof
    Column("spoiled", Integer, nullable=False, server_default=text("0")),
    Column("switched_at", Float, nullable=False, server_default=text("0")),  # when its weights were last replaced
)

load_failures = Table(  # engines that crashed or timed out while they loaded a version
    "load_failures",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("version", Integer, nullable=False),
    Column("engine", String(400), nullable=False),
    Column("reason", Text, nullable=False),
    Column("created_at", Float, nullable=False),
)
Index("ix_load_failures_version", load_failures.c.version)

calibrations = Table(  # difference between an engine and the trainer on version 0, which the engine is started with
    "calibrations",
    metadata,
    Column("engine", String(400), primary_key=True),
    Column("dtype", String(20), primary_key=True),
    Column("largest", Float, nullable=False),  # difference of one logprob
    Column("mean", Float, nullable=False),
    Column("created_at", Float, nullable=False),
)

leases = Table(
    "leases",
    metadata,
    Column("name", String(200), primary_key=True),  # what only one process at a time may do
    Column("owner", String(200)),
    Column("until", Float, nullable=False),  # Unix seconds
)

open_streams = Table(
    "open_streams",
    metadata,
    Column("msg_id", String(200), primary_key=True),
    Column("explorer", String(64), nullable=False),
    Column("task_id", String(400)),
    Column("run_id", String(400)),
    Column("key_group", String(200)),
)

# Rows by state: the sum of `n` over a state's slots. Triggers keep it exact, whoever writes; see migrations, 0008.
row_counts = Table(
    "row_counts",
    metadata,
    Column("state", String(12), primary_key=True),
    Column("slot", Id, primary_key=True, autoincrement=False),  # PostgreSQL: a new one for each change, until merged
    Column("n", BigInteger, nullable=False),
)
experiences.add_is_dependent_on(row_counts)
