"""Made-up records of updates."""

from __future__ import annotations

from trainer_service.watch.record import Record


def record(step: int = 7, **figures: float) -> Record:
    return Record(step, version=6, at=1_000_000.0, figures=figures, seconds={"train": 2.0}, signals={"reward": 3})
