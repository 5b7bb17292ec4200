"""The trainer with a fault put in from outside: it kills itself at a named point. Run as a module, with FAULT set.

FAULT: "before NAME" or "after NAME"; FAULT_CALL: at which call of it. SABOTAGE: turn an order round on purpose.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from services.cli import main
from shared.ledger import transitions
from trainer_service import loop, resume


def put_in(fault: str, call: int) -> None:
    when, name = fault.split()
    owner, attribute = {
        "write_full_version": (loop, "write_full_version"),
        "transitions.publish": (transitions, "publish"),
        "StateStore.save": (resume.StateStore, "save"),
        "StateStore.clean": (resume.StateStore, "clean"),
        "Trainer._make_official": (loop.Trainer, "_make_official"),
    }[name]
    original: Callable[..., Any] = getattr(owner, attribute)
    calls = 0

    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        counts = name != "transitions.publish" or kwargs.get("trainer") is not None  # the base version is no update
        calls += counts
        due = counts and calls == call
        if due and when == "before":
            die()
        result = original(*args, **kwargs)
        if due:
            die()
        return result

    setattr(owner, attribute, faulty)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sabotage() -> None:
    """CONSUMED before the state that contains the rows is durable."""

    def publish(self: loop.Trainer) -> None:
        version = self._next_version()
        path = f"trainer/{self._config.trainer.name}/state-{version:06d}"
        self._make_official(version, path)
        loop.write_full_version(
            self._config.root,
            self._policy,
            self._base_folder,
            version=version,
            parent=self._line.version,
            step=self._line.step,
            dtype=self._dtype,
            base=self._base,
        )
        self._states.save(self.backend, version)
        self._line = loop.Line(step=self._line.step, version=version)

    loop.Trainer._publish = publish  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ.get("SABOTAGE") == "consumed_before_saved":
        sabotage()
    put_in(os.environ.pop("FAULT"), int(os.environ.pop("FAULT_CALL", "1")))
    sys.exit(main())
