"""All of Flywheel on one machine, to be killed: explorer, trainer, the database, or the power of the machine itself."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from shared.config import Config
from tests.support.lives import Life, Lives
from tests.support.postgres import Postgres
from tests.support.processes import wait_for, write_config
from tests.support.servers import free_port
from tests.torture.power_cut import PowerCut

BATCH = 8  # rows
PARTS = ("explorer", "trainer")
MOST_STATEMENTS = 12  # of a transition, each at another place
PATIENCE_S, MOST_PATIENCE_S = 4.0, 60.0  # for a part to come by the point it is to die at; more if it starts slowly
STARTED = {"explorer": "listening", "trainer": "at work"}  # in their logs


class Whole:
    """Explorer and trainer over one scripted engine, on SQLite or a PostgreSQL of their own.

    forks: what starts them; None: a process of its own, which `cuts` need. cuts: power cuts will be played.
    careless: the database answers a COMMIT before it is durable.
    max_versions: by default all, for they are compared in the end.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        engine_url: str,
        database: str,
        forks: Lives | None = None,
        *,
        cuts: bool = False,
        careless: bool = False,
        max_versions: int = 10_000,
    ) -> None:
        self._folder = folder
        root = folder / "data"
        root.mkdir()
        segments_mb = 1 if cuts else 16
        self.postgres = Postgres(durable=not careless, wal_segment_mb=segments_mb) if database == "postgresql" else None
        database_url = self.postgres.new_database() if self.postgres else None
        self.config = _config(root, model, engine_url, database_url, max_versions)
        self._file = write_config(self.config, folder / "flywheel.yaml")
        self._cuts: list[PowerCut] = []
        environ: dict[str, str] = {}
        if cuts:
            self._cuts.append(PowerCut(root))
            environ = self._cuts[0].environ
            if self.postgres:
                self.postgres.kill()
                self._cuts.append(PowerCut(self.postgres.data))
                self.postgres.environ = self._cuts[1].environ
            for cut in self._cuts:
                cut.begin()
            if self.postgres:
                self.postgres.start()
        self._sabotage = {"SABOTAGE": "commit_without_fsync"} if careless and not self.postgres else {}
        self._owns_forks = forks is None
        self.forks = forks or Lives(folder / "lives.log", **environ)
        self.lives: dict[str, Life] = {}
        self.kills: Counter[str] = Counter()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.config.explorer.port}"

    def log(self, part: str) -> str:
        file = self._folder / f"{part}.log"
        return file.read_text() if file.exists() else ""

    def points_file(self, part: str) -> Path:
        return self._folder / f"{part}.points"

    def begin(self, part: str, fault: str = "") -> None:
        """Start the explorer or the trainer; it will kill itself at the fault's point."""
        environ = {"FAULT": fault, "POINTS": str(self.points_file(part)), **self._sabotage}
        self.lives[part] = self.forks.begin([part, "-c", str(self._file)], self._folder / f"{part}.log", **environ)

    def kill(self, part: str) -> None:
        self.lives[part].kill()
        self.kills[part] += 1

    def kill_database(self) -> None:
        assert self.postgres is not None
        self.postgres.kill()
        self.kills["database"] += 1
        self.postgres.start()

    def black_out(self) -> None:
        """The machine's power goes, and comes back; explorer and trainer are down."""
        for life in self.lives.values():
            life.kill()
        if self.postgres:
            self.postgres.kill()
        for cut in self._cuts:
            cut.cut()
        self.kills["power"] += 1
        if self.postgres:
            self.postgres.start()

    def finish(self, **trainer: Any) -> None:
        """Both start again, unharmed; `trainer` changes the trainer's settings."""
        for life in self.lives.values():
            life.kill()
        settings = self.config.trainer.model_copy(update=trainer)
        write_config(self.config.model_copy(update={"trainer": settings}), self._file)
        for part in PARTS:
            self.begin(part)

    def commit(self) -> None:
        """Asked again where the disk stands still for longer than the explorer lets a caller wait."""
        wait_for(lambda: httpx.post(f"{self.url}/commit", timeout=60).status_code == 200, "a commit", 240)

    def close(self) -> None:
        for life in self.lives.values():
            life.kill()
        if self._owns_forks:
            self.forks.stop()
        if self.postgres:
            self.postgres.stop()


def _config(root: Path, model: Path, engine_url: str, database_url: str | None, max_versions: int) -> Config:
    return Config.model_validate(
        {
            "root_dir": str(root),
            "database_url": database_url,
            "model": {"path": str(model)},
            "explorer": {
                "port": free_port(),
                "engines": [{"name": "e0", "url": engine_url}],
                "reload": {"poll_interval_s": 0.02},
            },
            "trainer": {
                "batch_size": BATCH,
                "learning_rate": 1e-3,
                "poll_interval_s": 0.02,
                "cpu_threads": 1,
                # what the scripted engine says is of no model, and few rows change all of one of random weights
                "breaker": {"logprob_gap": None, "change_of_update": None},
            },
            "versions": {"max_versions": max_versions},
        }
    )


class NamedPoints:
    """Which named points a part has come by, and which of them it is to die at next: each in its turn."""

    def __init__(self, file: Path, draw: random.Random) -> None:
        self._file, self._draw = file, draw
        self._tried: Counter[str] = Counter()

    def read(self) -> tuple[set[str], Counter[str]]:
        """(points passed by, how often it died at each)."""
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        died = Counter(line.removeprefix("died ") for line in lines if line.startswith("died "))
        return {line for line in lines if not line.startswith("died ") and not _is_repeated(line)}, died

    def next(self) -> str:
        """A point, or nothing: then the part is killed at a random moment."""
        known, _ = self.read()
        if not known or self._draw.random() < 0.4:
            return ""
        point = min(sorted(known), key=lambda one: (self._tried[one], self._draw.random()))
        self._tried[point] += 1
        return point


def _is_repeated(point: str) -> bool:
    """Whether it lies behind a statement that a transition repeats for each row or version that it changes."""
    number = point.rpartition(" ")[2]
    return number.isdecimal() and int(number) > MOST_STATEMENTS


class Deaths:
    """Each part lives until it comes by a named point, or until a random moment, is killed there, and starts again."""

    def __init__(self, whole: Whole, draw: random.Random) -> None:
        self.points = {part: NamedPoints(whole.points_file(part), draw) for part in PARTS}
        self._whole, self._draw = whole, draw
        self._until = dict.fromkeys(PARTS, 0.0)  # time.monotonic()
        self._patience_s = dict.fromkeys(PARTS, PATIENCE_S)
        self._starts = dict.fromkeys(PARTS, 0)

    def look(self) -> None:
        """Kill and start what is due."""
        for part in PARTS:
            life = self._whole.lives.get(part)
            if life is not None and life.alive and time.monotonic() < self._until[part]:
                continue
            patience_s = self._patience_s[part]
            if life is not None:
                starts = self._whole.log(part).count(STARTED[part])
                factor = 1.5 if life.alive and starts == self._starts[part] else 0.9
                patience_s = min(max(patience_s * factor, PATIENCE_S), MOST_PATIENCE_S)
                self._starts[part] = starts
                self._whole.kill(part)
            fault = self.points[part].next()
            lasts_s = patience_s if fault else self._draw.uniform(0.2, 3) * patience_s / PATIENCE_S
            self._patience_s[part] = patience_s
            self._until[part] = time.monotonic() + lasts_s
            self._whole.begin(part, fault)
