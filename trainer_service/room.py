"""Waits for disk space for the next version and its state. Meanwhile the trainer publishes nothing.

The batch stays leased, and the trainer's row reports what is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from shared.config import Config
from shared.errors import LedgerError
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.log import StageLogger
from shared.stop_request import StopRequest
from shared.versions import version_path
from trainer_service.disk import GIB, lack_of_space, size_of
from trainer_service.errors import Stopped
from trainer_service.learner import Learner
from trainer_service.resume import StateStore

log = StageLogger("trainer")


class Room:
    """Disk space of one trainer."""

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        stop: StopRequest,
        states: StateStore,
        clean: Callable[[], None],
        learner: Learner,
    ) -> None:
        """clean: deletes what is not kept."""
        self._config, self._ledger, self._stop, self._states = config, ledger, stop, states
        self._clean, self._learner = clean, learner

    def wait(self) -> None:
        """Wait while the disk is too full for the next version. Raises Stopped."""
        lack = self._shortage()
        if lack is None:
            return
        log.warning("not publishing: the disk is too full", reason=lack)
        self._report(lack)
        while self._shortage() is not None:
            if self._stop.wait(self._config.trainer.poll_interval_s):
                raise Stopped
            self._clean()
        self._report(None)
        log.info("publishing again: the disk has room")

    def wait_after(self, failure: str, pause_s: float) -> None:
        """Wait after a write that failed although the disk reported enough space. Raises Stopped."""
        log.warning("not published: the disk is full; trying again", reason=failure, after_s=pause_s)
        self._report(failure)
        self._clean()
        if self._stop.wait(pause_s):
            raise Stopped
        self._report(None)

    def _report(self, trouble: str | None) -> None:
        with contextlib.suppress(LedgerError), self._ledger.write() as connection:  # the ledger may be on the same disk
            transitions.report_trouble(connection, name=self._config.trainer.name, trouble=trouble)

    def _shortage(self) -> str | None:
        first, whole = self._config.root / version_path(0), self._config.model.kind == "full"
        version_bytes = size_of(first) if whole else self._learner.trained_bytes
        state_bytes = self._states.newest_bytes() or self._learner.state_bytes
        needs = {first.parent: version_bytes, self._states.folder: state_bytes}
        return lack_of_space(needs, int(self._config.trainer.min_free_disk_gb * GIB))
