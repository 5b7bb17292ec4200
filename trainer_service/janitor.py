"""Deletes versions and saved states that are not kept: after each version, at start, and while the disk is full.

Only the trainer writes to the folder of versions, so only the trainer deletes there. First the ledger marks a version's
files as given up, unless a reader has a lease on them; then the folder is renamed, and then deleted. The next run
completes what a crash interrupted. After an outage of the ledger, or a jump of its clock, leases of live owners look
expired; nothing is deleted until they have renewed them.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from functools import partial

from shared.belonging import version_folders, version_number
from shared.config import Config
from shared.errors import LedgerError, StartupError
from shared.ledger import transitions
from shared.ledger.connect import Ledger, database_time
from shared.ledger.queries import find_versions, kept_versions
from shared.log import StageLogger
from shared.process import process_name
from shared.versions import LARGEST_VERSION, version_name
from trainer_service.disk import GIB, set_aside, size_of, sweep
from trainer_service.resume import SavedState, StateStore

log = StageLogger("trainer")
_RENEWED_S = transitions.VERSION_LEASE_S / 2  # live owners renew leases within this time; a smaller jump ends none


class _LedgerWatch:
    """Detects outages of the ledger, and jumps of its clock: it was set forward, or its host or this one was suspended.

    `clock` must stop while this host is suspended, because processes on it renew no leases then.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ahead_s: float | None = None  # ledger's time minus `clock` at the last check
        self._settled_at = -math.inf
        self._reached_at: float | None = None  # at the last heartbeat; None: there are none yet

    def note_contact(self) -> None:
        """Note that a heartbeat reached the ledger."""
        self._note_outage()
        self._reached_at = self._clock()

    def _note_outage(self) -> None:
        """Begin to wait if no heartbeat has reached the ledger for so long that leases of others may have expired."""
        now = self._clock()
        if self._reached_at is not None and now - self._reached_at > _RENEWED_S:
            log.warning("no heartbeat reached the ledger; nothing is deleted for now", for_s=now - self._reached_at)
            self._settled_at, self._reached_at = now + _RENEWED_S, now

    def is_settled(self, database_now: float) -> bool:
        """Whether every live owner has renewed its leases since the last jump or outage."""
        self._note_outage()
        now = self._clock()
        ahead_s = database_now - now
        if self._ahead_s is not None and ahead_s > self._ahead_s + _RENEWED_S:
            log.warning("the ledger's clock has jumped; nothing is deleted for now", by_s=ahead_s - self._ahead_s)
            self._settled_at = now + _RENEWED_S
        self._ahead_s = ahead_s
        return now >= self._settled_at


class Janitor:
    """Applies the configuration's section `versions` to the folders of one trainer."""

    def __init__(
        self, config: Config, ledger: Ledger, states: StateStore, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = config.versions
        self._name = config.trainer.name
        self._root = config.root
        self._folder = config.root / "versions"
        self._ledger = ledger
        self._states = states
        self._owner = process_name()
        self._watch = _LedgerWatch(clock)

    def note_contact(self) -> None:
        """Note that a heartbeat of this trainer reached the ledger. Called from the heartbeat's thread."""
        self._watch.note_contact()

    def run(self, current: SavedState | None) -> None:
        """Delete what is not kept. current: the trainer's newest state. The next run retries what fails."""
        try:
            now = self._ledger.fetch(database_time)
            if not self._watch.is_settled(now):
                return
            self._give_up_versions()
            self._delete_versions()
            self._delete_states(current)
            self._delete_states_of_others()
        except LedgerError as error:
            log.debug("nothing is deleted: the ledger is unavailable", reason=str(error))
        except OSError as error:
            log.warning("old versions or states cannot be deleted", file=error.filename, reason=error.strerror)

    def _give_up_versions(self) -> None:
        settings = self._settings
        unknown = [row for row in self._ledger.fetch(kept_versions) if row.has_files and row.bytes is None]
        sizes = {row.version: size_of(self._root / row.path) for row in unknown}
        with self._ledger.write() as connection:
            given_up = transitions.give_up_files(
                connection,
                owner=self._owner,
                max_versions=settings.max_versions,
                max_bytes=math.inf if settings.max_gb is None else settings.max_gb * GIB,
                sizes=sizes,
                by=self._name,
            )
        if given_up:
            log.info("versions deleted", versions=given_up)

    def _delete_versions(self) -> None:
        """Delete the folders of all versions whose files the ledger has given up."""
        folders = version_folders(self._root)
        numbers = [number for number in map(version_number, folders) if number <= LARGEST_VERSION]
        rows = self._ledger.fetch(lambda connection: find_versions(connection, numbers)).values()
        given_up = {version_name(row.version) for row in rows if row.deleted_at is not None}
        set_aside([folder for folder in folders if folder.name in given_up])
        sweep(self._folder)

    def _delete_states(self, current: SavedState | None) -> None:
        """Delete all states but the newest ones of versions with files that are not rejected, and the current one.

        After a rollback, the state to start from is the newest of these.
        """
        path, keep = current.path if current else None, self._settings.keep_states
        with self._ledger.write() as connection:  # first, so that no rollback names a state that is being deleted
            kept = transitions.forget_old_states(connection, trainer=self._name, current=path, keep=keep)
        self._states.clean(kept)

    def _delete_states_of_others(self) -> None:
        """Delete states from which no trainer can start, of trainers of other names that have ended."""
        unusable = partial(transitions.unusable_states, but=self._name)
        for name in sorted({state.trainer for state in self._ledger.fetch(unusable)}):
            try:
                store = StateStore(self._root, name)
            except StartupError as error:  # a trainer of this name begins, or this one may not write there
                log.debug("states of another trainer are not deleted", trainer=name, reason=str(error))
                continue
            with contextlib.closing(store):  # only while they are renamed: a trainer of this name may want to begin
                states = [state for state in self._ledger.fetch(unusable) if state.trainer == name]
                set_aside([self._root / state.path for state in states])
            sweep(store.folder)
            with self._ledger.write() as connection:  # last, so that the next run completes what a crash interrupts
                transitions.forget_states(connection, name, [state.version for state in states])
            log.info("states of another trainer deleted", trainer=name, versions=[state.version for state in states])
