"""The ledger's tables, by subject."""

from shared.ledger.tables.base import metadata
from shared.ledger.tables.processes import calibrations, engines, explorers, leases, load_failures, open_streams
from shared.ledger.tables.rows import (
    IS_QUARANTINED,
    IS_READY,
    REHEARSABLE,
    WAITS,
    batches,
    experiences,
    idempotency,
    lineage,
    payloads,
    row_counts,
    signals,
)
from shared.ledger.tables.versions import decisions, trainer_states, trainers, version_leases, versions

__all__ = [
    "IS_QUARANTINED", "IS_READY", "REHEARSABLE", "WAITS", "batches", "calibrations", "decisions", "engines",
    "experiences", "explorers", "idempotency", "leases", "lineage", "load_failures", "metadata", "open_streams",
    "payloads", "row_counts", "signals", "trainer_states", "trainers", "version_leases", "versions",
]  # fmt: skip
