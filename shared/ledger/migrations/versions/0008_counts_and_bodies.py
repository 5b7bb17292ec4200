"""The database counts the rows in each state; an idempotency key stores the digest of its first request.

Counting a million rows takes too long for a status request. PostgreSQL's trigger adds a line for each statement, and
the lines are merged from time to time: transactions would block each other on a common line. SQLite has one writer, and
updates one line for each state.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

POSTGRESQL = """
CREATE FUNCTION count_experiences() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF TG_OP = 'INSERT' THEN
    INSERT INTO row_counts (state, slot, n)
      SELECT state, nextval('row_counts_slots'), count(*) FROM added GROUP BY state;
  ELSIF TG_OP = 'DELETE' THEN
    INSERT INTO row_counts (state, slot, n)
      SELECT state, nextval('row_counts_slots'), -count(*) FROM removed GROUP BY state;
  ELSE
    INSERT INTO row_counts (state, slot, n)
      SELECT state, nextval('row_counts_slots'), sum(n)
      FROM (SELECT state, 1 AS n FROM added UNION ALL SELECT state, -1 FROM removed) AS moved
      GROUP BY state HAVING sum(n) <> 0;
  END IF;
  RETURN NULL;
END $$
"""
TABLES_OF = {
    "insert": "NEW TABLE AS added",
    "update": "OLD TABLE AS removed NEW TABLE AS added",
    "delete": "OLD TABLE AS removed",
}
ADD = "INSERT INTO row_counts (state, slot, n) VALUES ({row}.state, 0, {n}) ON CONFLICT (state, slot) DO UPDATE SET n = n + {n};"
SQLITE = {
    "insert": ("AFTER INSERT ON experiences", ADD.format(row="NEW", n=1)),
    "update": (
        "AFTER UPDATE OF state ON experiences WHEN OLD.state <> NEW.state",
        ADD.format(row="OLD", n=-1) + ADD.format(row="NEW", n=1),
    ),
    "delete": ("AFTER DELETE ON experiences", ADD.format(row="OLD", n=-1)),
}


def upgrade() -> None:
    op.create_table(
        "row_counts",
        sa.Column("state", sa.String(length=12), nullable=False),
        sa.Column("slot", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False),
        sa.Column("n", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("state", "slot"),
    )
    if op.get_bind().dialect.name == "postgresql":
        op.execute("CREATE SEQUENCE row_counts_slots")
        op.execute(POSTGRESQL)
        for name, tables in TABLES_OF.items():
            op.execute(
                f"CREATE TRIGGER count_{name} AFTER {name.upper()} ON experiences REFERENCING {tables}"
                " FOR EACH STATEMENT EXECUTE FUNCTION count_experiences()"
            )
    else:
        for name, (when, statements) in SQLITE.items():
            op.execute(f"CREATE TRIGGER count_{name} {when} BEGIN {statements} END")
    op.execute("INSERT INTO row_counts (state, slot, n) SELECT state, 0, count(*) FROM experiences GROUP BY state")
    _make_idempotency(sa.Column("body", sa.LargeBinary(), nullable=False))


def downgrade() -> None:
    for name in SQLITE:
        where = " ON experiences" if op.get_bind().dialect.name == "postgresql" else ""
        op.execute(f"DROP TRIGGER count_{name}{where}")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION count_experiences")
        op.execute("DROP SEQUENCE row_counts_slots")
    op.drop_table("row_counts")
    _make_idempotency()


def _make_idempotency(*more: sa.Column[bytes]) -> None:
    """Create the table again: its contents are at most a day old, and have another form."""
    op.drop_table("idempotency")
    op.create_table(
        "idempotency",
        sa.Column("key", sa.String(length=400), nullable=False),
        *more,
        sa.Column("response", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("key"),
    )
