"""Flywheel's commands with injected faults. Run as a module: python -m tests.support.faults COMMAND ...

Points at which a process kills itself:

    before NAME, after NAME     of a function in FUNCTIONS, at its FAULT_CALL-th call
    NAME 2, NAME committed      inside a transition of the ledger, or one of READS: after its second statement,
                                and after the COMMIT

FAULT: the point. POINTS: a file to which every process adds the points that it passes, and `died POINT` before it dies.
LIMIT_FILE: bytes of the largest file that the kernel allows. LIMIT_MEMORY: bytes of data beyond those in use.
FAIL_UPDATES: numbers of the updates, for example 2,3, that fail after their last step.
HANG_IN_UPDATE: RANK:NUMBER, the rank that stops when it begins that optimizer step.
FULL_DISK: how often the disk is full in the middle of a write, for example {"version": 2, "state": 1}.
FREE_BYTES_WITHOUT: FILE:BYTES, the free space of every disk until the file exists.
SABOTAGE: a bug added on purpose, which a harness must find.
"""

from __future__ import annotations

import ctypes
import errno
import inspect
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from sqlalchemy import Engine, event

from services.cli import main
from shared import versions
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger

FUNCTIONS = (
    "Learner.write_version",
    "StateStore.save",
    "StateStore.clean",
    "transitions.publish",
    "transitions.publish_ahead",
    "Trainer._make_official",
    "Janitor._give_up_versions",
    "Janitor._delete_versions",
    "janitor.set_aside",
    "janitor.sweep",
    "resume.set_aside",
)
READS = ("any_lease_expired", "count_ready", "load_lease", "oldest_ready", "remembered_answer")


class Faults:
    """The points of this process, and the one at which it dies."""

    def __init__(self, fault: str, call: int = 1, points: Path | None = None) -> None:
        self._fault, self._call, self._points = fault, call, points
        self._known = set(points.read_text().splitlines()) if points and points.exists() else set()
        self._here = threading.local()  # the running transition, and how many of its statements have run

    def pass_by(self, point: str) -> None:
        """The process passes this point."""
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
        """Add points between the statements of every transition and of READS."""
        for name, function in inspect.getmembers(transitions, inspect.isfunction):
            if "connection" in inspect.signature(function).parameters:
                self._name(transitions, name)
        for name in READS:
            self._name(queries, name)
        event.listen(Engine, "after_cursor_execute", self._after_statement)
        record: Any = import_module("shared.ledger.transitions.record")
        record.copy_rows = self._followed(record.copy_rows)  # COPY triggers no event of SQLAlchemy
        Ledger._transaction = self._ended(Ledger._transaction)  # type: ignore[method-assign]

    def _name(self, module: ModuleType, name: str) -> None:
        setattr(module, name, self._named(name, getattr(module, name)))

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

    def _ended(self, transaction: Callable[..., AbstractContextManager[None]]) -> Callable[..., Any]:
        @contextmanager
        def ended(*args: Any) -> Iterator[None]:
            try:
                with transaction(*args):
                    yield
            except BaseException:
                self._forget()
                raise
            if name := self._forget():
                self.pass_by(f"{name} committed")

        return ended

    def _after_statement(self, *_: object) -> None:
        if getattr(self._here, "inside", False):
            self._here.statements += 1
            self.pass_by(f"{self._here.name} {self._here.statements}")

    def _forget(self) -> str | None:
        name = getattr(self._here, "name", None)
        self._here.name = None
        return name

    def watch_trainer(self) -> None:
        """Add points around the steps of publishing."""
        from trainer_service import janitor, learner, loop, resume

        owners = {
            "Learner": learner.Learner,
            "StateStore": resume.StateStore,
            "Trainer": loop.Trainer,
            "Janitor": janitor.Janitor,
            "janitor": janitor,
            "resume": resume,
            "transitions": transitions,
        }
        for name in FUNCTIONS:
            owner, _, attribute = name.rpartition(".")
            self._surround(owners[owner], attribute, name)

    def fail_updates(self, numbers: set[int]) -> None:
        """Make these updates fail after their last step."""
        from trainer_service.errors import UpdateError
        from trainer_service.update import Updater

        original, count = Updater.update, itertools.count(1)

        def update(*args: Any, **kwargs: Any) -> Any:
            stats = original(*args, **kwargs)
            if next(count) in numbers:
                raise UpdateError("a fault was put in")
            return stats

        Updater.update = update  # type: ignore[method-assign]

    def hang_in_update(self, rank: str, number: int) -> None:
        """Stop this rank when it begins this optimizer step; the others continue."""
        from trainer_service.backends.deepspeed import DeepSpeedBackend

        original, count = DeepSpeedBackend.step, itertools.count(1)

        def step(*args: Any, **kwargs: Any) -> Any:
            if next(count) == number and os.environ["RANK"] == rank:
                os.kill(os.getpid(), signal.SIGSTOP)
            return original(*args, **kwargs)

        DeepSpeedBackend.step = step  # type: ignore[method-assign]

    def fill_disk(self, failures: dict[str, int]) -> None:
        """Make the disk full, this many times, at the end of writing a version other than the base, or a state."""
        from trainer_service import resume

        for what, module in {"version": versions, "state": resume}.items():
            module.fsync = self._full(failures.get(what, 0), module.fsync)  # type: ignore[attr-defined]

    def _full(self, left: int, fsync: Callable[[Path], None]) -> Callable[[Path], None]:
        numbers = iter(range(left))

        def full(path: Path) -> None:
            unfinished = ".tmp-v" in str(path) or "state-" in str(path)
            if unfinished and "v000000" not in str(path) and next(numbers, None) is not None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            fsync(path)

        return full

    def _surround(self, owner: Any, attribute: str, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, attribute)

        def surrounded(*args: Any, **kwargs: Any) -> Any:
            # the base version is not an update
            counts = name != "transitions.publish" or kwargs.get("trainer") is not None
            if counts:
                self.pass_by(f"before {name}")
            result = original(*args, **kwargs)
            if counts:
                self.pass_by(f"after {name}")
            return result

        setattr(owner, attribute, surrounded)


def consume_before_saving() -> None:
    """Mark rows CONSUMED before the state that contains them is durable."""
    from trainer_service import loop

    def publish(self: loop.Trainer) -> None:
        version = self._write(lambda c: transitions.reserve_version(c, writer=self._config.trainer.name))
        path = f"trainer/{self._config.trainer.name}/state-{version:06d}"
        parent, step = self._progress.version, self._progress.step
        self._make_official(version, loop.SavedState(path, None))
        self._learner.write_version(self._config.root, version=version, parent=parent, step=step)
        self._learner.save(version)

    loop.Trainer._publish = publish  # type: ignore[method-assign]


def commit_without_fsync() -> None:
    """Make SQLite answer a COMMIT before it is on the disk."""
    from shared.ledger import driver

    prepare = driver.prepare_sqlite

    def careless(connection: Any, patience: driver.Patience) -> None:
        prepare(connection, patience)
        connection.execute("PRAGMA synchronous=NORMAL")

    driver.prepare_sqlite = careless


SABOTAGE = {"consumed_before_saved": consume_before_saving, "commit_without_fsync": commit_without_fsync}


def limit_resources() -> None:
    """Set the kernel's limits, and the free space of disks."""
    if limit := os.environ.pop("LIMIT_FILE", ""):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    if limit := os.environ.pop("LIMIT_MEMORY", ""):
        used = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
        most = int(limit) + 1024 * int(used.split()[1])
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        ctypes.CDLL(None).mallopt(-3, 128 * 1024)  # M_MMAP_THRESHOLD: freed memory returns to the kernel
    if full := os.environ.pop("FREE_BYTES_WITHOUT", ""):
        file, free = full.rsplit(":", 1)
        real = shutil.disk_usage
        shutil.disk_usage = lambda path: (  # type: ignore[assignment]
            real(path) if Path(file).exists() else real(path)._replace(free=int(free))
        )


def run(arguments: list[str]) -> int:
    """Run a command once, with the faults of the environment."""
    limit_resources()
    if name := os.environ.get("SABOTAGE"):
        SABOTAGE[name]()
    points = os.environ.get("POINTS")
    faults = Faults(
        os.environ.pop("FAULT", ""), int(os.environ.pop("FAULT_CALL", "1")), Path(points) if points else None
    )
    faults.watch_transitions()
    if arguments[0] in ("train", "trainer"):
        faults.watch_trainer()
        faults.fill_disk(json.loads(os.environ.pop("FULL_DISK", "{}")))
        if hang := os.environ.pop("HANG_IN_UPDATE", ""):
            rank, number = hang.split(":")
            faults.hang_in_update(rank, int(number))
        faults.fail_updates({int(number) for number in os.environ.pop("FAIL_UPDATES", "0").split(",")})
    return main(arguments)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
