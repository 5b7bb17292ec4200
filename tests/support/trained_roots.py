"""Root folders with ready rows, for trainers as real processes."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import select

from shared.config import load_config
from shared.ledger.connect import Ledger
from shared.ledger.queries import list_versions
from shared.ledger.tables import batches, experiences
from tests.support.experiences import record_ready, trainer_config
from tests.support.lives import Life, Lives
from tests.support.processes import Process, wait_for, write_config

ROWS, BATCH = 40, 8
LAST = ROWS // BATCH  # the version that contains all rows


def prepare(root: Path, model: Path, rows=(), database_url: str | None = None, **trainer: object) -> None:
    """Make a root folder with ready rows."""
    config = trainer_config(root, model, batch_size=BATCH, **trainer)
    write_config(config.model_copy(update={"database_url": database_url}), root / "flywheel.yaml")
    ledger = open_ledger(root)
    record_ready(ledger, rows)
    ledger.close()


def start(root: Path) -> Process:
    return Process(["trainer", "-c", str(root / "flywheel.yaml")], root / "trainer.log")


def begin(lives: Lives, root: Path, **environ: str) -> Life:
    """Like `start`, without the time of the imports, and with faults."""
    return lives.begin(["trainer", "-c", str(root / "flywheel.yaml")], root / "trainer.log", **environ)


def newest(root: Path) -> int:
    ledger = open_ledger(root)
    with ledger.read() as connection:
        version = max((row.version for row in list_versions(connection) if row.may_serve), default=-1)
    ledger.close()
    return version


def line_of(root: Path) -> list[int]:
    """The versions that may serve, from the base on; each is the parent of the next."""
    ledger = open_ledger(root)
    with ledger.read() as connection:
        rows = [row for row in list_versions(connection) if row.may_serve]
    ledger.close()
    assert [row.parent for row in rows] == [None, *(row.version for row in rows)][: len(rows)]
    return [row.version for row in rows]


def open_ledger(root: Path) -> Ledger:
    return Ledger.open(load_config(root / "flywheel.yaml").ledger_url)


def check_same_line(root: Path, undisturbed: Path, last: int = LAST) -> None:
    """Every row trained once, and the very bits of the undisturbed run."""
    ledger = open_ledger(root)
    with ledger.read() as connection:
        rows = connection.execute(
            select(experiences.c.state, experiences.c.consumed_version).order_by(experiences.c.id)
        ).all()
        states = connection.execute(select(batches.c.state)).scalars().all()
    ledger.close()
    assert [tuple(row) for row in rows] == [("CONSUMED", 1 + index // BATCH) for index in range(BATCH * last)]
    assert states.count("CONSUMED") == last
    for version in range(last + 1):
        assert weights(root, version) == weights(undisturbed, version), f"version {version} differs"


def weights(root: Path, version: int) -> bytes:
    return (root / f"versions/v{version:06d}/model.safetensors").read_bytes()


def finish(lives: Lives, root: Path, last: int = LAST, **environ: str) -> None:
    """Run undisturbed up to the last version, and on until the trainer is idle."""
    log = root / "trainer.log"
    before = log.stat().st_size if log.exists() else 0
    with begin(lives, root, **environ) as trainer:
        wait_for(lambda: _said(log, before, b"no ready rows") or not trainer.alive, "the last version", 240)
        assert newest(root) == last
        assert trainer.stop() == 0


def _said(log: Path, before: int, line: bytes) -> bool:
    return log.exists() and line in log.read_bytes()[before:]
