"""Version 0, the base model: published before anything serves or trains.

PyTorch is imported only to write it: `flywheel engine` calls this at each start.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from sqlalchemy.exc import IntegrityError

from shared.belonging import require_kind, require_known_versions, require_same_shape
from shared.config import Config
from shared.errors import ConfigError, StartupError, VersionError
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import find_versions
from shared.log import StageLogger
from shared.versions import fingerprint, read_manifest, version_path

log = StageLogger("publish")


def ensure_base_version(config: Config, ledger: Ledger) -> None:
    """Publish version 0, the base model, unless it exists. Engine and trainer may call this at the same time.

    Raises ConfigError if the model folder is missing, version 0 came from another model, or later versions are of
    another kind; StartupError if the model is broken, or the root folder contains versions that are not in the ledger.
    """
    model_folder = Path(config.model.path)
    (config.root / "versions").mkdir(parents=True, exist_ok=True)
    with _exclusive(config.root / "versions" / ".base.lock"):
        if ledger.fetch(partial(find_versions, numbers=[0])):
            _require_same_base(config, model_folder, ledger)
            require_kind(config.model.kind, ledger)
            require_same_shape(config, ledger)
            return
        require_known_versions(config.root, ledger)
        from trainer_service.publish import as_published, write_base_version

        manifest = write_base_version(config.root, model_folder)
        try:
            with ledger.write() as connection:
                about = {"kind": "full", "step": 0, **as_published(config.root, manifest)}
                transitions.publish(connection, version=0, parent=None, **about)
        except IntegrityError:
            return  # another machine published the same model first
        log.info("base model published", version=0, path=str(model_folder), dtype=manifest.probe.dtype)


def _require_same_base(config: Config, model_folder: Path, ledger: Ledger) -> None:
    """Raise ConfigError if version 0 came from a model other than model.path, StartupError if it is damaged."""
    try:
        manifest = read_manifest(config.root / version_path(0))
    except VersionError as exc:
        raise StartupError(
            f"the ledger {ledger.shown_url} lists version 0, but its folder is missing or damaged ({exc}); restore it, "
            "or correct root_dir or database_url"
        ) from exc
    if (model_folder / "config.json").exists() and fingerprint(model_folder) != manifest.base_fingerprint:
        raise ConfigError(
            f"root_dir={str(config.root)!r} began with the model {manifest.base!r}, but model.path names another one, "
            f"{str(model_folder)!r}; give the new model a root_dir of its own"
        )


@contextlib.contextmanager
def _exclusive(file: Path) -> Iterator[None]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
