"""Empty durable databases, and the rows to fill them."""

from __future__ import annotations

import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import text, update

from explorer_service.chat.conversation import DIGEST_BYTES
from shared.experience import Sample, Sampling, Tokens, new_message_id
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.tables import experiences
from tests.support.postgres import Postgres

KINDS = ("sqlite", "postgresql")
N_PROMPT, N_REPLY = 100, 64
WRITERS = 64
SMALL = 10_000  # rows
Figures = dict[str, float]
_draw = np.random.default_rng(0)


def make_sample(n_prompt: int = N_PROMPT, n_reply: int = N_REPLY, **more: Any) -> Sample:
    """A chat in its own conversation, with ids from a vocabulary of 150,000."""
    tokens = Tokens(
        _draw.integers(0, 150_000, n_prompt, dtype=np.int32),
        _draw.integers(0, 150_000, n_reply, dtype=np.int32),
        -_draw.random(n_reply, dtype=np.float32),
    )
    name = new_message_id("chatcmpl-")
    more = {"exchange": os.urandom(DIGEST_BYTES), **more}
    return Sample(name, 0, 0, 0, tokens, Sampling(), "stop", time.time(), 0.1, **more)


class Databases:
    """Empty durable databases of both kinds on one disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = Postgres(folder, durable=True)

    def url(self, kind: str) -> str:
        if kind == "sqlite":
            return f"sqlite:///{self._folder / uuid.uuid4().hex}.sqlite3"
        return self._server.new_database()

    def open(self, kind: str) -> Ledger:
        return Ledger.open(self.url(kind).replace("postgresql://", "postgresql+psycopg://"))

    def stop(self) -> None:
        self._server.stop()


def fill(ledger: Ledger, rows: int) -> None:
    """Add trained rows, as nearly all rows of an old ledger are."""
    for done in range(0, rows, 5000):
        with ledger.write() as connection:
            transitions.record(connection, [make_sample(32, 16) for _ in range(min(5000, rows - done))])
            connection.execute(update(experiences).where(experiences.c.state == "RECORDED").values(state="CONSUMED"))
        print(f"filled {done + 5000} of {rows}", file=sys.stderr, end="\r")
    tidy(ledger)


def tidy(ledger: Ledger) -> None:
    """Do what PostgreSQL does by itself sooner or later."""
    if not ledger.shown_url.startswith("sqlite"):
        with ledger._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("VACUUM ANALYZE"))


def size_of(ledger: Ledger) -> int:
    """Bytes of rows and payloads, including indexes."""
    size = "SELECT pg_total_relation_size('experiences') + pg_total_relation_size('payloads')"
    if ledger.shown_url.startswith("sqlite"):
        size = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
    with ledger.read() as connection:
        return int(connection.execute(text(size)).scalar_one())
