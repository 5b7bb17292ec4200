"""Every change of state in the ledger, and nowhere else.

A row's way:   record → RECORDED → commit → READY → claim → LEASED → publish → CONSUMED
               any of the first three → DISCARDED with a reason; LEASED → READY when a lease is given back or runs out
A version's:   publish → PUBLISHED → SERVING → RETIRED, or REJECTED with a reason

Each function runs inside the caller's writing transaction and changes rows only by statements that name the state they
come from, so whoever loses a race changes nothing. Callers say `transitions.claim(...)`; a file for each stage.
"""

from shared.ledger.transitions.claim import (
    any_lease_expired,
    claim,
    close_empty_batch,
    discard_stale,
    extend_lease,
    give_back,
    load_lease,
    quarantine,
)
from shared.ledger.transitions.commit import commit, expire
from shared.ledger.transitions.erase import Erased, erase, remove
from shared.ledger.transitions.feedback import (
    Receipt,
    apply_feedback,
    forget_answers,
    recompute_rewards,
    remember_answer,
    remembered_answer,
)
from shared.ledger.transitions.publish import LeaseLost, announce_trainer, dismiss_trainer, publish
from shared.ledger.transitions.record import record
from shared.ledger.transitions.rows import choice_name, count_ready, oldest_ready
from shared.ledger.transitions.serve import reject_version, serve_version

__all__ = [
    "Erased",
    "LeaseLost",
    "Receipt",
    "announce_trainer",
    "any_lease_expired",
    "apply_feedback",
    "choice_name",
    "claim",
    "close_empty_batch",
    "commit",
    "count_ready",
    "discard_stale",
    "dismiss_trainer",
    "erase",
    "expire",
    "extend_lease",
    "forget_answers",
    "give_back",
    "load_lease",
    "oldest_ready",
    "publish",
    "quarantine",
    "recompute_rewards",
    "record",
    "reject_version",
    "remember_answer",
    "remembered_answer",
    "remove",
    "serve_version",
]
