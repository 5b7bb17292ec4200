"""TensorBoard's event files, written by PyTorch with the package tensorboard."""

from __future__ import annotations

from pathlib import Path

from trainer_service.watch.record import Record


class TensorBoard:
    """Writes one scalar for each figure, over updates."""

    def __init__(self, folder: Path) -> None:
        """Raises ImportError."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, record: Record) -> None:
        for name, value in record.flat().items():
            self._writer.add_scalar(name, value, record.step, record.at)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
