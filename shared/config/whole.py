"""The whole file: settings of all processes, and one section for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from shared.config.base import Section, require_distinct
from shared.config.engine import EngineConfig
from shared.config.explorer import ExplorerConfig
from shared.config.model import ModelConfig
from shared.config.reward import RewardConfig
from shared.config.trainer import TrainerConfig
from shared.config.versions import VersionsConfig

DATABASES = ("postgresql://", "postgres://", "postgresql+psycopg://", "sqlite:///")  # how their URLs begin


class Config(Section):
    """The whole file."""

    root_dir: str = "./flywheel-data"
    """Shared folder: versions/ and the trainer's private state. Relative to the configuration file."""
    database_url: str | None = Field(default=None, repr=False)
    """The ledger; null: SQLite in root_dir; postgresql://user:pw@host/db"""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Minimum level of log messages."""
    model: ModelConfig
    explorer: ExplorerConfig = ExplorerConfig()
    engine: EngineConfig = EngineConfig()
    reward: RewardConfig = RewardConfig()
    trainer: TrainerConfig = TrainerConfig()
    versions: VersionsConfig = VersionsConfig()

    @property
    def root(self) -> Path:
        return Path(self.root_dir)

    @property
    def versions_served(self) -> int:
        """Number of versions among which an engine can divide its chats.

        It has to compute all of them at once: requests of others would wait as long as those of these go on. Besides,
        it holds one that it loads.
        """
        if self.model.kind != "lora":
            return 1
        return min(self.engine.versions_held - 1, self.engine.max_loras)

    @property
    def needed_to_serve_more(self) -> str:
        """The settings that limit `versions_served`, as a refusal names them."""
        if self.model.kind != "lora":
            return "model.kind: lora"
        limits = {"max_loras": self.engine.max_loras, "max_cpu_loras": self.engine.versions_held - 1}
        names = (f"engine.{name}" for name, limit in limits.items() if limit == self.versions_served)
        return f"a higher {' and '.join(names)}"

    @property
    def ledger_url(self) -> str:
        """SQLAlchemy's URL of the ledger."""
        return ledger_url(self.database_url or sqlite_url(self.root / "ledger.sqlite3"))

    @model_validator(mode="after")
    def _check_devices(self) -> Config:
        """Engines of other machines have other GPUs. A trainer is known to share those of engines on loopback only."""
        users = [(f"explorer.engines {one.name!r}", one.machine, one.devices or ()) for one in self.explorer.engines]
        users.append(("trainer.devices", "localhost", self.trainer.devices or ()))
        owner: dict[tuple[str, int], str] = {}
        for name, machine, devices in users:
            require_distinct(f"devices of {name}", map(str, devices))
            for device in devices:
                if (machine, device) in owner and self.engine.gpu_share is None:
                    raise ValueError(
                        f"{owner[machine, device]} and {name} both name GPU {device}, of which an engine takes 0.9; "
                        "set engine.gpu_share to what an engine may take, or name another GPU"
                    )
                owner[machine, device] = name
        return self

    @model_validator(mode="after")
    def _check_deltas(self) -> Config:
        if self.versions.delta and self.model.kind == "lora":
            raise ValueError(
                "versions.delta=true is for model.kind: full, and an adapter is smaller than a delta; set it to false"
            )
        if self.versions.delta and self.engine.staging_dir is None:
            raise ValueError(
                "versions.delta=true needs engine.staging_dir, where engines rebuild versions; set it to a folder on "
                "the engines' own disk, or versions.delta: false"
            )
        return self

    @model_validator(mode="after")
    def _check_database(self) -> Config:
        if self.database_url is not None:
            check_database_url("database_url", self.database_url)
        return self


def check_database_url(setting: str, url: str) -> None:
    """Raise ValueError for a URL that is no database. The message omits the URL, which may contain a password."""
    if not url.startswith(DATABASES):
        raise ValueError(f"{setting}: write postgresql://user:pw@host/db or sqlite:///FILE")
    if url.startswith("sqlite:") and ("?" in url or url.removeprefix("sqlite:///") in ("", ":memory:")):
        raise ValueError(f"{setting}: write sqlite:///FILE; the file's name has %3F for ?, and no options follow it")
    if not url.startswith("sqlite:") and not _is_whole(url):
        raise ValueError(
            f"{setting}: its host or port cannot be told; in the user's name and password write %40 for @, "
            "%2F for /, %3A for :, %23 for # and %3F for ?"
        )


def sqlite_url(file: Path) -> str:
    """Return SQLAlchemy's URL of a file with any name."""
    return f"sqlite:///{str(file).replace('%', '%25').replace('?', '%3F')}"


def agreed_settings(config: Config) -> dict[str, Any]:
    """Return the settings in which all explorers and trainers of a ledger must agree, by key.

    They say what a chat and a reward mean, which rows are trained on, and how many versions an engine serves.
    """
    compared: dict[str, Any] = {"model": {"name", "kind"}, "engine": {"dtype", "tool_parser"}, "reward": True}
    dumped = config.model_dump(mode="json", include=compared)
    agreed = {f"{section}.{key}": value for section, keys in dumped.items() for key, value in keys.items()}
    agreed["trainer.learns_from"] = sorted(config.trainer.learns_from)
    agreed["trainer.batch_size"] = config.trainer.batch_size
    if config.model.kind == "lora":
        agreed |= {"engine.max_loras": config.engine.max_loras, "engine.max_cpu_loras": config.engine.versions_held}
    return agreed


def differences(own: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Return in words how another process's settings differ. Older releases may lack a key, which is no difference."""
    both = ((key, value, theirs.get(key, value)) for key, value in own.items())
    return "; ".join(f"{key} is {mine!r} here and {other!r} there" for key, mine, other in both if mine != other)


def _is_whole(url: str) -> bool:
    """Whether a database's URL has a host and a numeric port, or names the server in its query."""
    try:
        parts = urlsplit(url)
        return parts.port != 0 and bool(parts.hostname or "host=" in parts.query or not parts.netloc)
    except ValueError:
        return False


def ledger_url(url: str) -> str:
    """Return a database's URL in SQLAlchemy's form: psycopg is the driver for PostgreSQL."""
    for prefix in ("postgresql://", "postgres://"):
        if url.startswith(prefix):
            return "postgresql+psycopg://" + url.removeprefix(prefix)
    return url
