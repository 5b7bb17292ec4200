"""The trainer's heartbeat: it shows that the trainer lives, and extends the leases of claimed rows while it works."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from shared.config import TrainerConfig
from shared.errors import LedgerError
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.log import StageLogger
from shared.stop_request import StopRequest

log = StageLogger("trainer")


@contextlib.contextmanager
def shown_while_it_starts(ledger: Ledger, config: TrainerConfig, stop: StopRequest) -> Iterator[None]:
    """Show the trainer as alive while it waits for a first signal and loads its models, until it announces itself.

    Leases of a process of its name that died are not extended: while the start fails, another trainer takes the rows.
    """
    with ledger.write() as connection:
        transitions.begin_trainer(connection, name=config.name)
    try:
        with Heartbeat(ledger, config, stop, extends_leases=False):
            yield
    except Exception:
        with contextlib.suppress(LedgerError), ledger.write() as connection:
            transitions.dismiss_trainer(connection, name=config.name)
        raise


class Heartbeat:
    """A thread that extends this trainer's leases during updates. If it fails, the trainer stops, with its error."""

    def __init__(
        self,
        ledger: Ledger,
        config: TrainerConfig,
        stop: StopRequest,
        note_contact: Callable[[], None] = lambda: None,
        *,
        extends_leases: bool = True,
    ) -> None:
        """note_contact: called after each heartbeat that reached the ledger."""
        self._ledger = ledger
        self._config = config
        self._stop = stop
        self._note_contact = note_contact
        self._lease_s = config.lease_s if extends_leases else None
        self._ended = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if error is None and self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        interval_s = min(self._config.lease_s / 4, 5.0)
        while not self._ended.wait(interval_s):
            try:
                with self._ledger.write() as connection:
                    transitions.extend_lease(connection, owner=self._config.name, lease_s=self._lease_s)
                self._note_contact()
            except LedgerError as error:
                log.debug("no heartbeat: the ledger is unavailable", reason=str(error))
            except Exception as error:  # boundary of the thread: the leases would expire unnoticed
                log.exception("the heartbeat failed; the trainer stops")
                self._failure = error
                self._stop.set()
                return
