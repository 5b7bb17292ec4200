"""All changes of state in the ledger. A file for each stage, and for the data that explorers share.

A row:       record → RECORDED → commit → READY → claim → LEASED → publish → CONSUMED
             any of the first three → DISCARDED with a reason; LEASED → READY when a lease is released or expires
             CONSUMED → commit → READY, for later signals that are another lesson
             RECORDED → restore_trained → CONSUMED, for an imported row that was trained on here
             RECORDED or CONSUMED → restore_quarantine → DISCARDED, for an imported row that was in quarantine
             (publish_ahead leaves rows LEASED until record_state)
A version:   reserve → RESERVED → publish → PUBLISHED → SERVING → RETIRED; SKIPPED, REJECTED or FAILED with a reason
A batch:     claim → LEASED → CONSUMED, or RETURNED

Each function runs inside the caller's write transaction. Its statements require the state that they change, so the
loser of a race changes nothing. On PostgreSQL a transaction locks trainers first, then versions, batches and rows, each
in ascending order, so that two of them do not deadlock; a new version's row, for which nobody waits, comes before its
base's. Callers write `transitions.claim(...)`.
"""

from shared.ledger.transitions.adapters import expect_adapter, hold_adapters, pin_version, renew_adapters, renew_pin
from shared.ledger.transitions.answers import NO_ANSWER, forget_answers, remember_answer, take_key
from shared.ledger.transitions.claim import Whole, claim, discard_stale
from shared.ledger.transitions.commit import commit, commit_part, expire
from shared.ledger.transitions.counts import merge_counts
from shared.ledger.transitions.engine_leases import (
    ENGINE_LEASE_S,
    acquire_engine,
    confirm_engine,
    release_engine,
    set_engine_state,
)
from shared.ledger.transitions.erase import Erased, erase, remove
from shared.ledger.transitions.failures import fail_update, mark_updating, quarantine
from shared.ledger.transitions.feedback import (
    GivenFeedback,
    Receipt,
    ReceiptState,
    apply_feedback,
    apply_to,
    recompute_rewards,
)
from shared.ledger.transitions.leases import LEASE_S, acquire_lease, release_lease, renew_lease
from shared.ledger.transitions.loads import calibrate_engine, count_load_failure
from shared.ledger.transitions.membership import heartbeat, sign_off
from shared.ledger.transitions.open_streams import RunName, close_stream, open_stream
from shared.ledger.transitions.publish import (
    announce_trainer,
    begin_trainer,
    choose_algorithms,
    dismiss_trainer,
    publish,
    publish_ahead,
    record_state,
    report_trouble,
    reset_breaker,
    trip_breaker,
)
from shared.ledger.transitions.record import lock_imports, record, restore_quarantine, restore_trained
from shared.ledger.transitions.release import close_empty_batch, extend_lease, give_back
from shared.ledger.transitions.retain import (
    VERSION_LEASE_S,
    forget_old_states,
    forget_states,
    give_up_files,
    lease_version,
    release_version,
    tag_version,
    untag_version,
    unusable_states,
)
from shared.ledger.transitions.rollback import Rollback, lock_trainer, require_not_rolled_back, roll_back
from shared.ledger.transitions.traffic import share_traffic
from shared.ledger.transitions.versions import (
    fail_version,
    prove_version,
    reject_version,
    reserve_version,
    retry_version,
    serve_version,
    skip_version,
    withdraw_versions,
)

__all__ = [
    "ENGINE_LEASE_S", "LEASE_S", "NO_ANSWER", "VERSION_LEASE_S", "Erased", "GivenFeedback", "Receipt", "ReceiptState",
    "Rollback", "RunName", "Whole", "acquire_engine", "acquire_lease", "announce_trainer", "apply_feedback",
    "apply_to", "begin_trainer", "calibrate_engine", "choose_algorithms", "claim", "close_empty_batch",
    "close_stream", "commit", "commit_part", "confirm_engine", "count_load_failure", "discard_stale",
    "dismiss_trainer", "erase", "expect_adapter", "expire", "extend_lease", "fail_update", "fail_version",
    "forget_answers", "forget_old_states", "forget_states", "give_back", "give_up_files", "heartbeat",
    "hold_adapters", "lease_version", "lock_imports", "lock_trainer", "mark_updating", "merge_counts", "open_stream",
    "pin_version", "prove_version", "publish", "publish_ahead", "quarantine", "recompute_rewards", "record",
    "record_state", "reject_version", "release_engine", "release_lease", "release_version", "remember_answer",
    "remove", "renew_adapters", "renew_lease", "renew_pin", "report_trouble", "require_not_rolled_back",
    "reserve_version", "reset_breaker", "restore_quarantine", "restore_trained", "retry_version", "roll_back",
    "serve_version", "set_engine_state", "share_traffic", "sign_off", "skip_version", "tag_version", "take_key",
    "trip_breaker", "untag_version", "unusable_states", "withdraw_versions",
]  # fmt: skip
