"""The trainer's loop: claim → batch → update → publish, and the way back after a crash."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shared.config import Config
from shared.errors import LedgerError, StartupError
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import TrainerRow, highest_version_number
from shared.lifecycle import StopRequest
from shared.log import StageLogger
from shared.versions import read_manifest, version_path
from trainer_service.backends.deepspeed import DeepSpeedBackend
from trainer_service.batch import assemble
from trainer_service.claim import Claimer, Heartbeat
from trainer_service.publish import saved_type, write_full_version
from trainer_service.resume import StateStore
from trainer_service.update import PPOUpdate, Stats

log = StageLogger("trainer")
T = TypeVar("T")


@dataclass(slots=True)
class Line:
    """Where the trainer stands on its line of weights."""

    step: int = 0  # updates behind the weights in memory
    version: int = 0  # the last version published, or begun from
    batch_ids: list[int] = field(default_factory=list)  # trained on since then; still leased
    stats: Stats = field(default_factory=dict)


class Trainer:
    """One trainer on one ledger. `run()` returns when asked to stop."""

    def __init__(
        self, config: Config, ledger: Ledger, update: PPOUpdate, policy: Any, states: StateStore, stop: StopRequest
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._update = update
        self._policy = policy
        self._states = states
        self._stop = stop
        self._line = Line()
        base = config.root / version_path(0)
        manifest = read_manifest(base)
        self._base_folder, self._base = base, (manifest.base, manifest.base_fingerprint)
        self._dtype = saved_type(base)

    @property
    def backend(self) -> DeepSpeedBackend:
        return self._update.backend

    def resume(self, row: TrainerRow | None, start_version: int) -> None:
        """Take back own leases and go on from the last saved state; without one, from `start_version`'s weights."""
        name = self._config.trainer.name
        with self._ledger.write() as connection:
            returned = transitions.give_back(connection, owner=name)
            self._line = Line(version=start_version)
            if row is not None and row.state_path is not None:
                self._line = Line(step=row.step, version=row.version)
            transitions.announce_trainer(
                connection,
                name=name,
                step=self._line.step,
                version=self._line.version,
                state_path=row.state_path if row else None,
            )
        if row is not None and row.state_path is not None:
            self._states.load(self.backend, row.state_path)
        self._states.clean(keep=row.state_path if row else None)
        log.info("at work", step=self._line.step, version=self._line.version, rows_taken_back=returned)

    def run(self) -> None:
        """Until asked to stop: claim, batch, update, publish."""
        config = self._config.trainer
        claimer = Claimer(self._ledger, config, self._stop)
        with Heartbeat(self._ledger, config, self._stop):
            while (lease := claimer.next()) is not None and not self._stop:
                self._line.batch_ids.append(lease.batch_id)
                own = (
                    self._line.version if len(self._line.batch_ids) == 1 else -1
                )  # weights moved since it was published
                self._line.stats = self._update.update(assemble(lease.rows), self._line.step, own)
                self._line.step += 1
                log.info("updated", step=self._line.step, **_shown(self._line.stats))
                if len(self._line.batch_ids) >= config.publish_every:
                    try:
                        self._publish()
                    except Stopped:
                        break
        self._leave()

    def _leave(self) -> None:
        """Give leases back, so that the rows need not wait for a restart."""
        name = self._config.trainer.name
        try:
            with self._ledger.write() as connection:
                returned = transitions.give_back(connection, owner=name)
                transitions.dismiss_trainer(connection, name=name)
        except LedgerError as error:
            log.warning("leases not given back; the next start takes them back", reason=str(error))
            return
        log.info("stopped", rows_given_back=returned)

    def _publish(self) -> None:
        """Version folder, then saved state, then one transaction that makes both official and the rows CONSUMED."""
        started = time.perf_counter()
        version = self._patiently(self._next_version)
        with self.backend.whole(list(self._policy.parameters())):
            write_full_version(
                self._config.root,
                self._policy,
                self._base_folder,
                version=version,
                parent=self._line.version,
                step=self._line.step,
                dtype=self._dtype,
                base=self._base,
            )
        state_path = self._states.save(self.backend, version)
        seconds = time.perf_counter() - started
        self._patiently(lambda: self._make_official(version, state_path))
        self._states.clean(keep=state_path)
        self._line = Line(step=self._line.step, version=version)
        log.info("published", version=version, seconds=seconds)

    def _next_version(self) -> int:
        with self._ledger.read() as connection:
            return highest_version_number(connection) + 1

    def _make_official(self, version: int, state_path: str) -> None:
        try:
            with self._ledger.write() as connection:
                transitions.publish(
                    connection,
                    version=version,
                    parent=self._line.version,
                    kind="full",
                    step=self._line.step,
                    trainer=self._config.trainer.name,
                    batch_ids=self._line.batch_ids,
                    state_path=state_path,
                    stats=self._line.stats,
                )
        except transitions.LeaseLost as exc:
            raise StartupError(f"{exc}; start again: it goes on from the last saved state, without these rows") from exc

    def _patiently(self, work: Callable[[], T]) -> T:
        """Do it as soon as the ledger is there. Raises Stopped when asked to stop meanwhile."""
        said = False
        while True:
            try:
                return work()
            except LedgerError as error:
                if not said:
                    log.warning("the ledger is away; waiting to publish", reason=str(error))
                said = True
            if self._stop.wait(self._config.trainer.poll_interval_s):
                raise Stopped


class Stopped(Exception):
    """Asked to stop while waiting for the ledger; the rows stay leased and are taken back at the next start."""


def _shown(stats: Stats) -> dict[str, object]:
    """The figures worth a line in the log."""
    names = ("rows", "reward_mean", "kl_to_reference", "clip_fraction", "grad_norm", "logprob_gap_max", "seconds")
    return {name: float(f"{stats[name]:.4g}") for name in names if name in stats}
