"""Rows, what was said about them, and their batches. Polled rows are narrow; tokens and texts are in `payloads`.

The columns of `experiences` are declared once, here: stage record, the lease and the export derive their lists from it.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from shared.experience import BatchState, State
from shared.ledger.tables.base import Id, metadata, partial_index

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
    Column("version_end", Integer, nullable=False),  # sampled the last token; -1: no version of this ledger did
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
    Column("consumed_version", Integer, info=_EXPORTED),  # the first version that was trained on it; see `lineage`
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

for _state in (State.RECORDED, State.READY, State.LEASED):
    partial_index(_state.lower(), f"state = '{_state}'", experiences.c.id)
partial_index("teaching", WAITS, experiences.c.id)
partial_index("rehearsable", REHEARSABLE, experiences.c.id)
partial_index("quarantined", IS_QUARANTINED, experiences.c.id)
partial_index("task", "task_id IS NOT NULL", experiences.c.task_id, experiences.c.run_id)
partial_index("task_ready", f"{IS_READY} AND task_id IS NOT NULL", experiences.c.task_id, experiences.c.run_id)
partial_index("batch", "batch_id IS NOT NULL", experiences.c.batch_id)
partial_index("parent", "parent_id IS NOT NULL", experiences.c.parent_id)
partial_index("conversation", "conversation_id IS NOT NULL", experiences.c.conversation_id)
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
partial_index("prefix", "prefix_of IS NOT NULL", payloads.c.prefix_of)

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
partial_index("leased", f"state = '{BatchState.LEASED}'", batches.c.owner)
experiences.add_is_dependent_on(batches)  # copy order: SQLite still has the foreign key


lineage = Table(  # the versions that were trained on a row
    "lineage",
    metadata,
    Column(
        "experience_id", Id, primary_key=True, autoincrement=False
    ),  # no foreign key, whose check would lock the row
    Column("version", Integer, primary_key=True, autoincrement=False),
    # the row was in its batches, and a saved state contains it; else published ahead of one, rehearsed, or from a file
    Column("consumed", Boolean, nullable=False),
)
Index("ix_lineage_version", lineage.c.version)

# Rows by state: the sum of `n` over a state's slots. Triggers keep it exact, whoever writes; see migrations, 0008.
row_counts = Table(
    "row_counts",
    metadata,
    Column("state", String(12), primary_key=True),
    Column("slot", Id, primary_key=True, autoincrement=False),  # PostgreSQL: a new one for each change, until merged
    Column("n", BigInteger, nullable=False),
)
experiences.add_is_dependent_on(row_counts)
