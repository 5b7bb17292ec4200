"""Weights & Biases. Its key and server come from its own environment variables."""

from __future__ import annotations

from pathlib import Path

from trainer_service.watch.record import Record


class WeightsAndBiases:
    """A run with the trainer's name; a restarted trainer starts another run in the same group."""

    def __init__(self, project: str, trainer: str, folder: Path) -> None:
        """Raises ImportError, and the errors of wandb if it cannot start a run."""
        import wandb

        figures_alone = wandb.Settings(console="off")  # do not upload the log
        self._run = wandb.init(project=project, group=trainer, name=trainer, dir=str(folder), settings=figures_alone)
        self._run.define_metric("*", step_metric="update")

    def write(self, record: Record) -> None:
        self._run.log({**record.flat(), "update": record.step, "version": record.version})

    def close(self) -> None:
        self._run.finish()
