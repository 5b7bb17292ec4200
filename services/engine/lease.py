"""A lease, renewed by a thread, on the version that an engine starts on: it keeps the files while the engine runs."""

from __future__ import annotations

import contextlib
import threading

from shared.config import Config
from shared.errors import LedgerError
from shared.experience import Purpose
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.log import StageLogger
from shared.process import process_name

log = StageLogger("engine")
_RENEW_S = transitions.VERSION_LEASE_S / 4


class StartLease:
    """The lease of this process on the version that its engine starts on. Renewed in the `with` block, ends with it."""

    def __init__(self, config: Config) -> None:
        self._ledger_url = config.ledger_url
        self._process = process_name()
        self._version: int | None = None
        self._lock = threading.RLock()  # one lease at a time: a renewal must not bring the previous one back
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="version-lease", daemon=True)

    def take(self, ledger: Ledger, version: int) -> bool:
        """Lease a version, and release any previous one. Returns False if its files are given up."""
        with self._lock, ledger.write() as connection:
            own, purpose = self._process, Purpose.ENGINE
            taken = transitions.lease_version(connection, version, reader=own, purpose=purpose, owner=own)
            transitions.release_version(connection, reader=own, purpose=purpose, but=version)
            self._version = version
        return taken

    def __enter__(self) -> StartLease:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(1.0)  # if the ledger is unavailable, the lease expires by itself

    def _run(self) -> None:
        ledger: Ledger | None = None
        has_ended = False
        with contextlib.ExitStack() as stack:
            while not has_ended:
                has_ended = self._ended.wait(_RENEW_S)
                if self._version is None:
                    continue
                try:
                    ledger = ledger or stack.enter_context(contextlib.closing(Ledger.open(self._ledger_url)))
                    (self._release if has_ended else self._renew)(ledger)
                except LedgerError as error:
                    log.debug("the version's lease is left as it is: the ledger is unavailable", reason=str(error))

    def _renew(self, ledger: Ledger) -> None:
        with self._lock:
            assert self._version is not None
            self.take(ledger, self._version)

    def _release(self, ledger: Ledger) -> None:
        with ledger.write() as connection:
            transitions.release_version(connection, reader=self._process, purpose=Purpose.ENGINE)
