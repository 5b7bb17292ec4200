"""Responses of the explorer, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Receipt:
    """The result of a feedback for one message.

    >>> Receipt("chatcmpl-1", "applied").state
    'applied'
    """

    msg_id: str
    state: str  # applied | updated | duplicate | unknown | already_trained | expired


@dataclass(frozen=True)
class Receipts:
    """The response to feedback: the number of changed targets, and a receipt for each target.

    >>> Receipts(1, (Receipt("chatcmpl-1", "applied"),)).msg_ids
    ['chatcmpl-1']
    """

    applied: int
    receipts: tuple[Receipt, ...]

    @property
    def msg_ids(self) -> list[str]:
        """The messages that the explorer knows."""
        return [receipt.msg_id for receipt in self.receipts if receipt.state != "unknown"]


@dataclass(frozen=True)
class Committed:
    """The response to a commit: rows that became READY, and all READY rows.

    >>> Committed(committed=2, ready=5).ready
    5
    """

    committed: int
    ready: int


@dataclass(frozen=True)
class Version:
    """One version of the model.

    >>> Version(number=3, state="SERVING", parent=2, reason=None, raw={}).number
    3
    """

    number: int
    state: str
    parent: int | None
    reason: str | None  # why it was rejected
    raw: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Status:
    """The explorer's status; `raw` is its whole response.

    >>> status = Status({"rows": {"READY": 7}, "versions": {"serving": 3}, "trainers": [{"alive": True}]})
    >>> status.ready, status.serving, status.is_training
    (7, 3, True)
    """

    raw: Mapping[str, Any]

    @property
    def ready(self) -> int:
        """Number of rows that wait for a trainer."""
        return int(self.raw.get("rows", {}).get("READY", 0))

    @property
    def serving(self) -> int | None:
        """The version in service; None before the first."""
        found = self.raw.get("versions", {}).get("serving")
        return None if found is None else int(found)

    @property
    def newest(self) -> int | None:
        """The newest version that is not rejected."""
        found = self.raw.get("versions", {}).get("newest")
        return None if found is None else int(found)

    @property
    def has_engine(self) -> bool:
        """Whether chats are served: not while every engine is unavailable, or has not proven its weights yet.

        >>> Status({"engines": [{"state": "unavailable"}]}).has_engine, Status({}).has_engine
        (False, True)
        """
        states = [engine.get("state") for engine in self.raw.get("engines", [])]
        return not states or any(state not in ("unavailable", "checking") for state in states)

    @property
    def is_training(self) -> bool:
        """Whether a trainer is alive."""
        return any(trainer.get("alive") for trainer in self.raw.get("trainers", []))

    @property
    def held(self) -> str | None:
        """Why every live trainer waits for an operator: its breaker has tripped. None if one of them trains.

        >>> Status({"trainers": [{"alive": True, "tripped": {"reason": "reward_drop=2 is above 1.5"}}]}).held
        'reward_drop=2 is above 1.5'
        """
        tripped = [trainer.get("tripped") for trainer in self.raw.get("trainers", []) if trainer.get("alive")]
        if not tripped or not all(tripped):
            return None
        return str(tripped[0].get("reason") or tripped[0].get("figure"))

    @property
    def batch_size(self) -> int | None:
        """Rows in a batch of the trainer; None if the explorer does not report it."""
        found = self.raw.get("batch_size")
        return int(found) if isinstance(found, int) else None
