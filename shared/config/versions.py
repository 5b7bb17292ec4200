"""Section `versions`: how versions are stored in the shared folder, and how many are kept."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shared.config.base import Count, Flag, Positive, Section


class VersionsConfig(Section):
    """How versions are stored in the shared folder, and how many keep their files. The ledger keeps all rows."""

    max_versions: Annotated[int, Field(ge=3, strict=True)] = 8
    """Number of versions whose files are kept, including version 0. Versions that serve, are tagged, in use or trained
    on are never deleted, nor are those that a delta needs, so there may be more."""
    max_gb: Positive | None = None
    """Maximum size of the files of all versions, GiB; null: no limit besides max_versions."""
    keep_states: Count = 3
    """Saved states that a trainer keeps, including the newest, as long as the versions' files are kept."""
    delta: Flag = False
    """Publish the changes since the previous version if they are less than a quarter of the bytes. Every engine must
    then be a `flywheel engine` with engine.staging_dir: other servers only load whole versions."""
    anchor_every: Count = 16
    """Of so many consecutive versions, at least one is stored whole even with deltas."""
