"""`flywheel train`: reads an export, builds the trainer, and trains on the rows."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from services.trainer import resumed, run_trainer
from shared.config import Config, ModelConfig
from shared.errors import ConfigError, StartupError
from shared.log import configure_logging
from shared.stop_request import StopRequest
from shared.versions import MANIFEST, version_path

if TYPE_CHECKING:
    from shared.experience import Experience
    from trainer_service.ranks import Ranks

_NEVER = 1 << 31  # versions between two saved states


def train_next_version(config: Config, file: Path, epochs: int) -> int:
    """Continue the state of the trainer of this name, and publish the next version of root_dir with its state."""
    base = config.root / version_path(0)
    rows = _read(config, file, base if base.exists() else Path(config.model.path))
    trainer = config.trainer.model_copy(update={"save_every": 1})  # a version without a state may be withdrawn
    return run_trainer(config.model_copy(update={"trainer": trainer}), partial(_work, rows=rows, epochs=epochs))


def train_into_folder(config: Config, file: Path, epochs: int, out: Path) -> int:
    """Start from model.path, and write the trained model to a new folder, as Hugging Face or PEFT would.

    root_dir is not read.
    """
    if out.exists():
        raise StartupError(f"--out {out} exists; name a folder that does not")
    if not out.absolute().parent.is_dir():
        raise StartupError(f"the folder of --out {out} does not exist; make it")
    rows = _read(config, file, Path(config.model.path))
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.absolute().parent) as root:
        watch = config.trainer.watch.model_copy(update={"port": None})  # a trainer that runs may listen there
        trainer = config.trainer.model_copy(update={"save_every": _NEVER, "watch": watch})
        versions = config.versions.model_copy(update={"delta": False})
        update = {"root_dir": root, "database_url": None, "trainer": trainer, "versions": versions}
        alone = config.model_copy(update=update)
        status = run_trainer(alone, partial(_work, rows=rows, epochs=epochs))
        folder = _as_model_folder(Path(root), config.model)
        private = Path(root) / "trainer" / trainer.name
        for watched in (*private.glob("figures*.jsonl"), private / "tensorboard"):
            if watched.exists():
                watched.rename(folder / watched.name)
        folder.rename(out)
    return status


def _as_model_folder(root: Path, model: ModelConfig) -> Path:
    """Return the folder of version 1 for other tools: without its manifest; an adapter with what PEFT needs."""
    from services.export_model import write_adapter

    folder, adapter = root / version_path(1), root / "adapter"
    if model.kind == "lora":
        adapter.mkdir()
        write_adapter(folder, root / version_path(0), adapter, model.path)
        return adapter
    (folder / MANIFEST).unlink()
    return folder


def _read(config: Config, file: Path, model: Path) -> list[Experience]:
    """Return the export's rows. Raises ConfigError and StartupError."""
    from trainer_service.export import read_export

    if config.trainer.ranks > 1:
        raise ConfigError(f"trainer.ranks={config.trainer.ranks}: `flywheel train` runs on one rank; set it to 1")
    configure_logging("trainer", config.log_level)
    return read_export(file, config, model)


def _work(config: Config, ranks: Ranks, stop: StopRequest, *, rows: list[Experience], epochs: int) -> None:
    from trainer_service.errors import Stopped
    from trainer_service.offline import OfflineTrainer

    try:
        with resumed(config, ranks, stop, OfflineTrainer, rows) as trainer:
            trainer.train(rows, epochs, stop)
    except Stopped as exc:
        raise StartupError("asked to stop before all epochs were done; nothing was published") from exc
