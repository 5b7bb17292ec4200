"""All queries of the ledger outside transitions, in a file for each subject. Nothing here writes."""

from shared.ledger.queries.adapters import leased_versions, pinned_versions, served_adapters
from shared.ledger.queries.answers import answers_about, answers_before, remembered_answer
from shared.ledger.queries.explorers import (
    EngineRow,
    Followed,
    any_stream_open,
    live_explorers,
    owned_engines,
    read_calibration,
    read_engine,
    streams_of_task,
)
from shared.ledger.queries.lease import (
    any_lease_expired,
    deaths_will_be_blamed,
    failures_of_oldest,
    held_rows,
    is_leased,
    is_to_blame,
    load_lease,
    quarantined,
)
from shared.ledger.queries.preferences import ids_read
from shared.ledger.queries.rehearsal import draw_rehearsal
from shared.ledger.queries.rows import (
    count_by_state,
    count_ready,
    exchange_of_choice,
    known_choices,
    list_run,
    names_of_rows,
    oldest_done,
    oldest_ready,
    size_bytes,
    version_of_exchange,
)
from shared.ledger.queries.signals import (
    corrected_later,
    count_signals,
    do_repeat,
    load_signals,
    recent_kinds,
    tasks_repeat,
)
from shared.ledger.queries.status import LedgerProgress, Pace, Tripped, ledger_status, pace, progress
from shared.ledger.queries.targets import Target, Targets, find_targets
from shared.ledger.queries.trainers import StateRow, TrainerRow, find_trainer, list_states, list_trainers, live_trainers
from shared.ledger.queries.versions import (
    Rewards,
    VersionRow,
    Wanted,
    any_published,
    find_versions,
    kept_versions,
    list_versions,
    reason_against_serving,
    rewards_by_version,
    shares_of_traffic,
    versions_on_disk,
    wanted_versions,
)

__all__ = [
    "EngineRow", "Followed", "LedgerProgress", "Pace", "Rewards", "StateRow", "Target", "Targets", "TrainerRow",
    "Tripped", "VersionRow", "Wanted", "answers_about", "answers_before", "any_lease_expired", "any_published",
    "any_stream_open", "corrected_later", "count_by_state", "count_ready", "count_signals", "deaths_will_be_blamed",
    "do_repeat", "draw_rehearsal", "exchange_of_choice", "failures_of_oldest", "find_targets", "find_trainer",
    "find_versions", "held_rows", "ids_read", "is_leased", "is_to_blame", "kept_versions", "known_choices",
    "leased_versions", "ledger_status", "list_run", "list_states", "list_trainers", "list_versions", "live_explorers",
    "live_trainers", "load_lease", "load_signals", "names_of_rows", "oldest_done", "oldest_ready", "owned_engines",
    "pace", "pinned_versions", "progress", "quarantined", "read_calibration", "read_engine", "reason_against_serving",
    "recent_kinds", "remembered_answer", "rewards_by_version", "served_adapters", "shares_of_traffic", "size_bytes",
    "streams_of_task", "tasks_repeat", "version_of_exchange", "versions_on_disk", "wanted_versions",
]  # fmt: skip
