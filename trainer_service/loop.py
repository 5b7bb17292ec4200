"""The trainer's loop: claim → batch → update → publish, and how it resumes after a crash."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sqlalchemy import Connection

from shared.config import Config
from shared.errors import DiskFull, LeaseLost, LedgerError, StartupError
from shared.experience import Experience, Lease
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import TrainerRow
from shared.log import StageLogger
from shared.stop_request import StopRequest
from shared.versions import Manifest, version_path
from trainer_service.answers import answer_tokenizer
from trainer_service.breaker import Breaker
from trainer_service.choice import as_row, extend_choice
from trainer_service.claim import Claimer
from trainer_service.delta import DeltaMaker
from trainer_service.disk import pauses_s
from trainer_service.errors import Stopped, UpdateError
from trainer_service.heartbeat import Heartbeat
from trainer_service.janitor import Janitor
from trainer_service.learner import Learner
from trainer_service.patience import PatientLedger
from trainer_service.publish import as_published
from trainer_service.resume import SavedState, StateStore, saved_state
from trainer_service.rollback import RollbackGuard
from trainer_service.room import Room
from trainer_service.update import Stats
from trainer_service.watch.record import Record, shown
from trainer_service.watch.writer import Watch

log = StageLogger("trainer")


@dataclass(slots=True)
class Progress:
    """The trainer's position: completed updates, published versions, and the batches that they contain."""

    step: int = 0  # number of updates applied to the weights in memory
    version: int = 0  # the last published version, or the version that training started from
    batch_ids: list[int] = field(default_factory=list)  # trained on since that version; their rows are still leased
    trained_on: set[int] = field(default_factory=set)  # ids of the rows that updates since that version have read
    held: dict[int, list[int]] = field(default_factory=dict)  # versions not in a saved state yet, with their batches
    stats: Stats = field(default_factory=dict)


class Trainer:
    """Runs one trainer on one ledger. `run()` returns after a stop request, or if it must be built again."""

    def __init__(
        self, config: Config, ledger: Ledger, learner: Learner, states: StateStore, stop: StopRequest, watch: Watch
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._learner = learner
        self._states = states
        self._stop = stop
        self._watch = watch
        self._patient = PatientLedger(ledger, stop, config.trainer.poll_interval_s)
        self._write = self._patient.write
        self._rollback = RollbackGuard(config.trainer.name)
        self._breaker = Breaker(config.trainer, ledger, self._patient, stop, watch.show_trip)
        self._janitor = Janitor(config, ledger, states)
        self._progress = self._saved = Progress()  # _saved: the progress at the last saved state, or at the start
        self._base_folder = config.root / version_path(0)
        self._room = Room(config, ledger, stop, states, lambda: self._janitor.run(learner.saved), learner)
        self._deltas = DeltaMaker(config.root, states.folder / "last-weights", config.versions.anchor_every)

    def resume(self, row: TrainerRow | None, start_version: int) -> None:
        """Load the last saved state or start from `start_version`; release leases that this trainer left behind."""
        name, saved = self._config.trainer.name, saved_state(row)
        self._progress = Progress(version=start_version)
        if row is not None and saved is not None:
            self._progress = Progress(step=row.step, version=row.version)
            self._learner.load(saved)
        self._saved = Progress(step=self._progress.step, version=self._progress.version)
        if self._ledger.fetch(lambda connection: queries.deaths_will_be_blamed(connection, name)):
            self._learner.require_harmless_update("trainers died in them")
        about: dict[str, Any] = {"name": name, "step": self._progress.step, "version": self._progress.version}
        about |= {"state_path": saved.path if saved else None, "state_sha256": saved.sha256 if saved else None}
        about["chosen"] = as_row(self._config.trainer)
        with self._ledger.write() as connection:
            self._rollback.begin(connection, row, None if saved else start_version)
            returned = transitions.give_back(connection, owner=name, rule=self._config.reward)
            transitions.announce_trainer(connection, **about)
        self._janitor.run(saved)
        log.info("at work", step=self._progress.step, version=self._progress.version, rows_taken_back=returned)

    def run(self) -> bool:
        """Claim, batch, update and publish until a stop is requested.

        Returns True if the trainer must be built again: it chose other algorithms (choice.py), or see rollback.py.
        """
        config = self._config.trainer
        vocabulary, context, rule = self._learner.vocabulary, self._learner.context, self._config.reward
        answers = answer_tokenizer(config, self._base_folder, vocabulary=vocabulary, context=context)
        if config.max_trajectory_tokens is None:
            config = config.model_copy(update={"max_trajectory_tokens": context})
        claimer = Claimer(self._ledger, config, self._stop, vocabulary, answers, self._rollback.check, rule)
        anew = False
        beats = Heartbeat(self._ledger, config, self._stop, self._janitor.note_contact)
        with beats, contextlib.suppress(Stopped), self._rollback.noted():
            self._breaker.wait()
            while (lease := self._claim(claimer)) is not None and not self._stop:
                if anew := extend_choice(self._patient, self._config, lease):
                    break
                if not self._learn(lease):
                    claimer.search_anew()
            self._save_unsaved_versions()
        self._release_leases()
        return anew or self._rollback.must_start_again

    def _claim(self, claimer: Claimer) -> Lease | None:
        with self._watch.stage("claim"):
            return claimer.next()

    def _learn(self, lease: Lease) -> bool:
        """Update the weights, and publish a version if one is due. Returns False if the rows were released."""
        try:
            rows = self._learner.prepare(lease.rows)
        except Stopped:  # nothing was trained on; versions that no state contains are saved before the end
            return True
        try:
            record = self._train(lease, rows)
        except UpdateError as error:
            self._undo(lease, str(error))
            return False
        trip = self._breaker.check(record)
        if trip is None and len(self._progress.batch_ids) >= self._config.trainer.publish_every:
            self._publish()
        self._watch.write(record)
        if trip is not None:
            self._breaker.hold(trip)
            self._restore()
            self._write(self._rollback.excluded(self._release_unsaved))
        return trip is None

    def _train(self, lease: Lease, rows: list[Experience]) -> Record:
        """Update the weights with one batch and return its measurements. Raises UpdateError and Stopped.

        rows: the batch's, prepared.
        """
        progress = self._progress
        self._mark_updating(lease, True)
        progress.batch_ids.append(lease.batch_id)
        progress.trained_on |= self._write(partial(queries.ids_read, rows=lease.rows))
        ahead = len(progress.batch_ids) - 1
        progress.stats = self._learner.train(rows, step=progress.step, version=progress.version, ahead=ahead)
        self._mark_updating(lease, False)
        progress.step += 1
        log.info("updated", step=progress.step, **shown(progress.stats))
        return self._measured(lease.rows, corrupt=len(lease.corrupt))

    def _measured(self, rows: Sequence[Experience], corrupt: int = 0) -> Record:
        """Return the measurements of the last update. rows: its batch. corrupt: number of rows left out of it."""
        progress, rewards = self._progress, self._write(queries.rewards_by_version)
        about = {"corrupt": corrupt, "step": progress.step, "version": progress.version}
        return Record.of(rows, progress.stats, self._learner.costs, rewards, **about)

    def _mark_updating(self, lease: Lease, updating: bool) -> None:
        mark = partial(transitions.mark_updating, batch_id=lease.batch_id, updating=updating)
        self._write(self._rollback.checked(mark) if updating else mark)

    def _undo(self, lease: Lease, failure: str) -> None:
        """Restore the last saved state, release all later batches, and count the failure on this batch's rows."""
        log.error("the update failed; its rows go back", rows=len(lease.rows), reason=failure)
        self._restore()
        if self._write(lambda connection: queries.is_to_blame(queries.held_rows(connection, lease.batch_id))):
            self._mark_updating(lease, False)
            self._learner.require_harmless_update(failure)

        def give_back(connection: Connection) -> int:
            quarantined = transitions.fail_update(connection, lease.batch_id, failure, rule=self._config.reward)
            self._release_unsaved(connection)
            return quarantined

        if quarantined := self._write(self._rollback.excluded(give_back)):
            log.error("rows quarantined", rows=quarantined, reason=failure)

    def _restore(self) -> None:
        """Restore the last saved state."""
        self._learner.restore()
        self._progress = Progress(step=self._saved.step, version=self._saved.version)

    def _release_unsaved(self, connection: Connection) -> None:
        """Release the rows and withdraw the versions that no saved state contains."""
        name = self._config.trainer.name
        transitions.withdraw_versions(connection, writer=name, after=self._saved.version)
        transitions.give_back(connection, owner=name, rule=self._config.reward)

    def _release_leases(self) -> None:
        """Make the leased rows READY again now instead of at the next start."""
        name = self._config.trainer.name
        try:
            with self._ledger.write() as connection:
                transitions.dismiss_trainer(connection, name=name)
                returned = transitions.give_back(connection, owner=name, rule=self._config.reward)
        except LedgerError as error:
            log.warning("leases not released; the next start releases them", reason=str(error))
            return
        log.info("stopped", rows_given_back=returned)

    def _publish(self) -> None:
        """Write a version's folder and, if one is due, a saved state; then commit both in one transaction."""
        version = self._write(lambda c: transitions.reserve_version(c, writer=self._config.trainer.name))
        pauses = pauses_s(self._config.trainer.poll_interval_s)
        while True:
            self._room.wait()
            started = time.perf_counter()
            try:
                manifest, state = self._write_files(version)
                break
            except DiskFull as error:
                self._room.wait_after(str(error), next(pauses))
        seconds = time.perf_counter() - started
        self._make_official(version, state, **as_published(self._config.root, manifest))
        log.info("published", version=version, seconds=seconds)
        self._janitor.run(self._learner.saved)

    def _write_files(self, version: int) -> tuple[Manifest, SavedState | None]:
        """Write the version's folder and, if one is due, a saved state. Raises DiskFull and leaves no files then."""
        with self._watch.stage("publish"):
            manifest = self._learner.write_version(
                self._config.root,
                version=version,
                parent=self._progress.version,
                step=self._progress.step,
                shrink=self._deltas.shrink if self._config.versions.delta else None,
            )
        if len(self._progress.held) + 1 < self._config.trainer.save_every:
            return manifest, None
        try:
            with self._watch.stage("save"):
                return manifest, self._learner.save(version)
        except DiskFull:
            shutil.rmtree(self._config.root / version_path(version), ignore_errors=True)
            raise

    def _save_unsaved_versions(self) -> None:
        """Before a regular exit, save a state for versions that no state contains, so that they are not withdrawn."""
        progress = self._progress
        if progress.held and progress.batch_ids:
            self._publish()  # the weights changed since the last version, so their state needs a new version
        if not self._progress.held:
            return
        try:
            self._record(self._learner.save(self._progress.version))
        except DiskFull as error:
            log.warning("no state saved; the next start withdraws the versions since the last one", reason=str(error))

    def _make_official(self, version: int, state: SavedState | None = None, **written: Any) -> None:
        """Commit a version. state: None: no state contains the version yet. written: ledger columns about its files."""
        progress, trainer = self._progress, self._config.trainer.name
        about: dict[str, Any] = {"version": version, "step": progress.step, "trainer": trainer, "stats": progress.stats}
        about |= {"parent": progress.version, "kind": self._config.model.kind, **written}
        about |= {"trained_on": progress.trained_on}
        if state is None:
            self._write_leased(lambda connection: transitions.publish_ahead(connection, **about))
            held = {**progress.held, version: progress.batch_ids}
            self._progress = Progress(step=progress.step, version=version, held=held)
            return
        about |= {"batch_ids": progress.batch_ids, "earlier": progress.held}
        about |= {"state_path": state.path, "state_sha256": state.sha256}
        self._write_leased(lambda connection: transitions.publish(connection, **about))
        self._note_saved(version)

    def _record(self, state: SavedState) -> None:
        """Commit a saved state that contains the versions before it."""
        progress, trainer = self._progress, self._config.trainer.name
        about: dict[str, Any] = {"version": progress.version, "step": progress.step, "stats": progress.stats}
        about |= {
            "trainer": trainer,
            "contained": progress.held,
            "state_path": state.path,
            "state_sha256": state.sha256,
        }
        self._write_leased(lambda connection: transitions.record_state(connection, **about))
        self._note_saved(progress.version)

    def _note_saved(self, version: int) -> None:
        self._progress = Progress(step=self._progress.step, version=version)
        self._saved = Progress(step=self._progress.step, version=version)

    def _write_leased(self, work: Callable[[Connection], None]) -> None:
        """Like `_write`, if this trainer has its leases; else raises StartupError. Raises RolledBack."""
        try:
            self._write(self._rollback.checked(work))
        except LeaseLost as exc:
            raise StartupError(f"{exc}; restart: it resumes from the last saved state, without these rows") from exc
