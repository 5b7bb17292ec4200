"""Logging: one line for each event, with fields, in the same format in every process.

    12:01:07 explorer reload    version in service  version=3 took_ms=84

Owns the format. Prompt text appears only at DEBUG; a trainer logs on rank 0 only.
"""

from __future__ import annotations

import logging
import os
import sys


class StageLogger:
    """A logger for one stage (or another fixed word, such as `engine`): `log.info("saved", version=3)`."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._logger = logging.getLogger(f"flywheel.{stage}")

    def _emit(self, level: int, event: str, exc_info: bool, fields: dict[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            text = " ".join(f"{key}={_show(value)}" for key, value in fields.items())
            self._logger.log(level, f"{self._stage:<9} {event}" + (f"  {text}" if text else ""), exc_info=exc_info)

    def debug(self, event: str, **fields: object) -> None:
        self._emit(logging.DEBUG, event, False, fields)

    def info(self, event: str, **fields: object) -> None:
        self._emit(logging.INFO, event, False, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._emit(logging.WARNING, event, False, fields)

    def error(self, event: str, **fields: object) -> None:
        self._emit(logging.ERROR, event, False, fields)

    def exception(self, event: str, **fields: object) -> None:
        """Log the event with the traceback of the current exception, at the boundary of a process or task."""
        self._emit(logging.ERROR, event, True, fields)


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return repr(text) if " " in text or not text else text


def configure_logging(process: str, level: str = "INFO") -> None:
    """Log to stderr; with `FLYWHEEL_LOG_PLAIN=1`, the supervisor adds time and process instead."""
    prefix = "" if os.environ.get("FLYWHEEL_LOG_PLAIN") else f"%(asctime)s {process:<8} "
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(prefix + "%(levelmark)s%(message)s", datefmt="%H:%M:%S"))
    handler.addFilter(_mark_level)
    root = logging.getLogger("flywheel")
    root.handlers = [handler]
    root.setLevel(level)
    root.propagate = False


def _mark_level(record: logging.LogRecord) -> bool:
    record.levelmark = "" if record.levelno <= logging.INFO else f"{record.levelname} "
    return True
