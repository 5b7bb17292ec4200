"""Flywheel's commands with faults put in from outside. Run as a module: python -m tests.faults COMMAND ...

Points at which a process kills itself:

    before NAME, after NAME     of a function in FUNCTIONS, at its FAULT_CALL-th call
    NAME 2, NAME committed      inside a transition of the ledger: after its second statement, and after the COMMIT

FAULT: the point. POINTS: a file to which every process adds the points it comes by, and `died POINT` before it dies.
SABOTAGE: a fault of ours, put in on purpose, that a harness must find.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Pool, event

from services.cli import main
from shared.ledger import transitions
from shared.ledger.connect import DriverCursor

FUNCTIONS = (
    "write_full_version",
    "StateStore.save",
    "StateStore.clean",
    "transitions.publish",
    "Trainer._make_official",
)


class Faults:
    """The points of this process, and the one at which it ends."""

    def __init__(self, fault: str, call: int = 1, points: Path | None = None) -> None:
        self._fault, self._call, self._points = fault, call, points
        self._known = set(points.read_text().splitlines()) if points and points.exists() else set()
        self._here = threading.local()  # which transition runs, and how many of its statements have

    def pass_by(self, point: str) -> None:
        """The process is at this point now."""
        if self._points and point not in self._known:
            self._known.add(point)
            self._note(point)
        if point == self._fault:
            self._call -= 1
            if not self._call:
                self._note(f"died {point}")
                os.kill(os.getpid(), signal.SIGKILL)

    def _note(self, line: str) -> None:
        if self._points:
            with self._points.open("a") as file:
                file.write(line + "\n")

    def watch_transitions(self) -> None:
        """Points between the statements of every transition."""
        for name, function in inspect.getmembers(transitions, inspect.isfunction):
            if not name.startswith("_") and "connection" in inspect.signature(function).parameters:
                setattr(transitions, name, self._named(name, function))
        event.listen(Engine, "after_cursor_execute", self._after_statement)
        for name in ("execute", "execute_each", "copy_rows"):
            setattr(DriverCursor, name, self._followed(getattr(DriverCursor, name)))
        for owner, commit in ((Connection, "_commit_impl"), (DriverCursor, "commit")):
            setattr(owner, commit, self._ended(getattr(owner, commit)))
        event.listen(Engine, "rollback", lambda _connection: self._forget())
        event.listen(Pool, "reset", lambda *_: self._forget())  # undoes what a driver alone had begun

    def _named(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def named(*args: Any, **kwargs: Any) -> Any:
            self._here.name, self._here.statements, self._here.inside = name, 0, True
            try:
                return function(*args, **kwargs)
            finally:
                self._here.inside = False

        return named

    def _followed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def followed(*args: Any) -> Any:
            result = function(*args)
            self._after_statement()
            return result

        return followed

    def _ended(self, commit: Callable[[Any], None]) -> Callable[[Any], None]:
        def committed(owner: Any) -> None:
            commit(owner)
            if name := self._forget():
                self.pass_by(f"{name} committed")

        return committed

    def _after_statement(self, *_: object) -> None:
        if getattr(self._here, "inside", False):
            self._here.statements += 1
            self.pass_by(f"{self._here.name} {self._here.statements}")

    def _forget(self) -> str | None:
        name = getattr(self._here, "name", None)
        self._here.name = None
        return name

    def watch_trainer(self) -> None:
        """Points around the steps of publishing."""
        from trainer_service import loop, resume

        owners = {"StateStore": resume.StateStore, "Trainer": loop.Trainer, "transitions": transitions}
        for name in FUNCTIONS:
            owner, _, attribute = name.rpartition(".")
            self._surround(owners.get(owner, loop), attribute, name)

    def _surround(self, owner: Any, attribute: str, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, attribute)

        def surrounded(*args: Any, **kwargs: Any) -> Any:
            # the base version is no update
            counts = name != "transitions.publish" or kwargs.get("trainer") is not None
            if counts:
                self.pass_by(f"before {name}")
            result = original(*args, **kwargs)
            if counts:
                self.pass_by(f"after {name}")
            return result

        setattr(owner, attribute, surrounded)


def consume_before_saving() -> None:
    """CONSUMED before the state that contains the rows is durable."""
    from trainer_service import loop

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


def commit_without_fsync() -> None:
    """SQLite answers a COMMIT before it is on the disk."""
    from shared.ledger import connect

    prepare = connect._prepare_sqlite

    def careless(connection: Any, record: object) -> None:
        prepare(connection, record)
        connection.execute("PRAGMA synchronous=NORMAL")

    connect._prepare_sqlite = careless


SABOTAGE = {"consumed_before_saved": consume_before_saving, "commit_without_fsync": commit_without_fsync}


def run(arguments: list[str]) -> int:
    """One life of a command, as the environment says."""
    if name := os.environ.get("SABOTAGE"):
        SABOTAGE[name]()
    points = os.environ.get("POINTS")
    faults = Faults(
        os.environ.pop("FAULT", ""), int(os.environ.pop("FAULT_CALL", "1")), Path(points) if points else None
    )
    faults.watch_transitions()
    if arguments[0] == "trainer":
        faults.watch_trainer()
    return main(arguments)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
