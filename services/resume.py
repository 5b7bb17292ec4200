"""`flywheel trainer --resume`: resumes a trainer whose breaker has tripped."""

from __future__ import annotations

import contextlib
import fcntl

from shared.config import Config
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.log import StageLogger, configure_logging

log = StageLogger("trainer")


def resume_trainer(config: Config) -> bool:
    """Reset the breaker. Returns whether a trainer of this name runs here, which then continues by itself."""
    configure_logging("trainer", config.log_level)
    name = config.trainer.name
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger, ledger.write() as connection:
        had_tripped = transitions.reset_breaker(connection, name=name)
    runs = _is_running(config)
    if not had_tripped:
        log.info("its breaker has not tripped", trainer=name, running=runs)
    elif runs:
        log.info("the trainer that runs goes on, with the settings that it was started with", trainer=name)
    return runs


def _is_running(config: Config) -> bool:
    """Whether a process on this root folder has the lock of the trainer's folder; see StateStore."""
    try:
        with (config.root / "trainer" / config.trainer.name / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
