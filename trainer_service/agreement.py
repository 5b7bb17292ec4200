"""Compares the trainer's settings with those of live explorers.

Explorers decide by `trainer.algorithm` which rows become ready, and tell agents `trainer.batch_size`; so a trainer with
another file would wait for rows that never come.
"""

from __future__ import annotations

import threading

from shared.config import Config, agreed_settings, differences
from shared.errors import LedgerError
from shared.ledger.connect import Ledger
from shared.ledger.queries.explorers import settings_of_explorers
from shared.log import StageLogger

log = StageLogger("trainer")
INTERVAL_S = 5.0


class Agreement:
    """A thread that logs once in what explorers are configured otherwise. Compares in the `with` block, first at once.

    A failure only ends the comparison.
    """

    def __init__(self, ledger: Ledger, config: Config) -> None:
        self._ledger = ledger
        self._own = agreed_settings(config)
        self._logged: dict[str, str] = {}  # by explorer: the differences
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="agreement", daemon=True)

    def __enter__(self) -> Agreement:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        has_ended = False
        while not has_ended:
            try:
                self._compare()
            except LedgerError as error:
                log.debug("settings are not compared: the ledger is unavailable", reason=str(error))
            except Exception:  # boundary of the thread
                log.exception("settings are not compared any more")
                return
            has_ended = self._ended.wait(INTERVAL_S)

    def _compare(self) -> None:
        explorers = self._ledger.fetch(settings_of_explorers)
        found = {name: text for name, theirs in explorers.items() if (text := differences(self._own, theirs))}
        for text in sorted({text for name, text in found.items() if self._logged.get(name) != text}):
            log.error(
                "explorers have other settings than this trainer; start all processes of a ledger with the same file",
                explorers=", ".join(sorted(name for name, differing in found.items() if differing == text)),
                differences=text,
            )
        self._logged = found
