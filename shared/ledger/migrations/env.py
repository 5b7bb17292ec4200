"""Alembic's entry: runs the migrations on the connection from shared.ledger.migrate, in its transaction."""

from __future__ import annotations

from alembic import context

from shared.ledger.tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, render_as_batch=connection.dialect.name == "sqlite")
with context.begin_transaction():
    context.run_migrations()
