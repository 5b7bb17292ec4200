"""Explorers on one ledger that soon learn of one another."""

from __future__ import annotations

import pytest

from explorer_service import membership


@pytest.fixture
def frequent_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Explorers in this process have more heartbeats. Leases last as long as ever."""
    monkeypatch.setattr(membership, "HEARTBEAT_S", 0.4)
    monkeypatch.setattr(membership, "NOTICED_S", 0.6)
