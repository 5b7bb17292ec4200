"""Checks that a root folder and a ledger belong together, so that a wrong database_url or root_dir changes nothing.

A trainer reserves a version's number in the ledger before it writes the folder. Only the base model's is not reserved:
a crash leaves at most that one folder without a row in the ledger.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from shared.adapters import AdapterConfig, read_adapter_config
from shared.config import Config
from shared.errors import ConfigError, StartupError, VersionError
from shared.ledger.connect import Ledger
from shared.ledger.queries import VersionRow, kept_versions, list_versions
from shared.log import StageLogger
from shared.versions import manifest_sha256, version_name

log = StageLogger("publish")
REMEDY = (
    "nothing was deleted; set database_url (FLYWHEEL_DATABASE_URL) to the ledger that they belong to, "
    "restore that ledger, or move them out of root_dir"
)


def require_belonging(root: Path, ledger: Ledger) -> None:
    """Raise StartupError if the folder contains versions of another ledger, or none of this ledger's versions.

    It compares equal numbers, too: the folder is the wrong one if the base has another manifest than in the ledger, or
    if every version that an engine has proven has one. A single damaged version is tolerated: the explorer serves
    without it.
    """
    require_known_versions(root, ledger)
    rows = [row for row in ledger.fetch(kept_versions) if row.may_serve]
    if rows and not any((root / row.path).is_dir() for row in rows):
        raise StartupError(
            f"the ledger {ledger.shown_url} names versions up to {version_name(rows[-1].version)}, and "
            f"{root / 'versions'} holds none of them; set root_dir to the folder that they are in, or mount it"
        )
    proven = [row for row in rows if row.served_at is not None and row.version != 0 and (root / row.path).is_dir()]
    exchanged = [row for row in proven if _is_exchanged(root, row)]
    suspects = [row for row in rows if row.version == 0 and _is_exchanged(root, row)]
    if len(exchanged) == len(proven):
        suspects += exchanged
    if suspects:
        row = suspects[0]
        raise StartupError(
            f"{root / row.path} holds another {version_name(row.version)} than the ledger {ledger.shown_url} names "
            f"(the sha256 of its MANIFEST.json differs); set root_dir to that ledger's folder, or database_url "
            f"(FLYWHEEL_DATABASE_URL) to that folder's ledger; if both are right, restore {row.path}"
        )


def _is_exchanged(root: Path, row: VersionRow) -> bool:
    """Whether the folder has a manifest other than the one in the ledger."""
    try:
        return row.manifest_sha256 not in (None, manifest_sha256(root / row.path))
    except OSError:  # missing, or not there yet: its reader reports that
        return False


def require_known_versions(root: Path, ledger: Ledger) -> None:
    """Raise StartupError if there are more versions without a row in the ledger than one crash leaves.

    Logs a warning if the folder holds the base model only, and the ledger no version.
    """
    folders = version_folders(root)  # before the ledger: a trainer reserves a number before it writes the folder
    newest = ledger.fetch(partial(list_versions, at_most=1))
    highest = newest[0].version if newest else -1
    unknown = [folder.name for folder in folders if version_number(folder) > max(highest, 0)]
    if unknown:
        raise StartupError(
            f"{root / 'versions'} holds {in_short(unknown)}, and the ledger {ledger.shown_url} "
            f"{'knows no version' if highest < 0 else f'ends with {version_name(highest)}'}; {REMEDY}"
        )
    if folders and highest < 0:
        log.warning(
            "the folder holds version 0, and the ledger knows no version: unless a crash left this, the ledger is "
            "another one; set database_url (FLYWHEEL_DATABASE_URL) to the one of this folder, or correct root_dir",
            folder=root / "versions",
            ledger=ledger.shown_url,
        )


def require_kind(kind: str, ledger: Ledger) -> None:
    """Raise ConfigError if the ledger has versions of a kind other than model.kind. Version 0 fits both kinds."""
    rows = [row for row in ledger.fetch(kept_versions) if row.version != 0 and row.has_files and row.kind != kind]
    if rows:
        raise ConfigError(
            f"model.kind={kind}, and {version_name(rows[-1].version)} of the ledger {ledger.shown_url} is of the kind "
            f"{rows[-1].kind}; set model.kind: {rows[-1].kind}, or begin with a new root_dir and database"
        )


def require_same_shape(config: Config, ledger: Ledger) -> None:
    """Raise ConfigError if the newest adapter's rank or alpha is not the configured one.

    Adapters whose configuration cannot be read are skipped: engines start on version 0, and the explorer serves without
    them. A trainer checks the version that it starts from.
    """
    model = config.model
    rows = [row for row in ledger.fetch(kept_versions) if row.may_serve and row.version > 0 and row.has_files]
    newest = None if model.kind == "full" else _newest_adapter(config.root, rows)
    if newest is None:
        return
    version, adapter = newest
    for key, wanted, found in (("rank", model.lora.rank, adapter.r), ("alpha", model.lora.alpha, adapter.lora_alpha)):
        if wanted != found:
            raise ConfigError(
                f"model.lora.{key}={wanted:g}, and version {version} in {config.root} was trained with "
                f"{found:g}; set model.lora.{key}: {found:g}, or give the new ones a root_dir of their own"
            )


def _newest_adapter(root: Path, rows: list[VersionRow]) -> tuple[int, AdapterConfig] | None:
    """Return the newest version whose configuration can be read."""
    for row in reversed(rows):
        try:
            return row.version, read_adapter_config(root / row.path)
        except VersionError as error:
            log.warning("version skipped", version=row.version, reason=str(error))
    return None


def version_folders(root: Path) -> list[Path]:
    """Return the folders of versions, including those without a row."""
    return [folder for folder in (root / "versions").glob("v*") if folder.name[1:].isdigit()]


def version_number(folder: Path) -> int:
    return int(folder.name[1:])


def in_short(names: list[str]) -> str:
    """Return the sorted names, with the middle of a long list left out."""
    names = sorted(names)
    return ", ".join(names if len(names) <= 4 else [*names[:2], "…", names[-1]])
