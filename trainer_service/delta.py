"""Publishes a delta, the changes since the parent, in place of a version's weights if it is much smaller.

A delta is computed from the parent's files, which are read from disk and verified, and not from weights in memory, so
that it is correct for every reader of those files. If the parent is a delta itself, its whole files are those that this
trainer kept when it published it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from shared.chain import MOST_DELTAS, read_chain
from shared.delta import write_delta
from shared.errors import VersionError
from shared.log import StageLogger
from shared.versions import WEIGHTS_SUFFIX, DeltaOf, Manifest, delta_name, file_entry

log = StageLogger("publish")
MOST_OF_WHOLE = 0.25  # share of the weights; a larger delta does not justify reading both files


class DeltaMaker:
    """Makes deltas of one trainer's versions, and keeps the whole weights of the last version."""

    def __init__(self, root: Path, last_weights: Path, anchor_every: int) -> None:
        """last_weights: a private folder. anchor_every: of so many consecutive versions at least one stays whole."""
        self._root = root
        self._last_weights = last_weights
        self._anchor_every = anchor_every

    def shrink(self, folder: Path, manifest: Manifest) -> Manifest:
        """Replace the weights of a new version by deltas if these are small. Returns the resulting manifest.

        The version stays whole if its parent's files are not there as published: after a crash between two versions,
        for example. Raises OSError.
        """
        weights = sorted(file.name for file in folder.glob(f"*{WEIGHTS_SUFFIX}"))
        of = self._write_deltas(folder, weights, manifest.parent)
        if of is None:
            for name in weights:
                (folder / delta_name(name)).unlink(missing_ok=True)
            shutil.rmtree(self._last_weights, ignore_errors=True)
            return manifest
        whole = {name: file_entry(folder / name) for name in weights}
        self._last_weights.mkdir(exist_ok=True)
        for name in weights:
            shutil.move(folder / name, self._last_weights / name)
        return msgspec.structs.replace(manifest, form="delta", of=of, whole=whole)

    def _write_deltas(self, folder: Path, weights: list[str], parent: int | None) -> DeltaOf | None:
        """Write a delta next to each weights file. Returns what they are deltas of; None: the version stays whole."""
        if parent is None:
            return None
        try:
            chain = read_chain(self._root, parent)
        except VersionError as error:
            log.warning("a whole version is published: its parent cannot be read", reason=str(error))
            return None
        last = chain[-1]
        if len(chain) >= min(self._anchor_every, MOST_DELTAS) or weights != sorted(last.manifest.weights):
            return None
        older = last.folder if last.manifest.form == "whole" else self._last_weights
        most = int(MOST_OF_WHOLE * sum((folder / name).stat().st_size for name in weights))
        for name in weights:
            if not (older / name).is_file() or file_entry(older / name) != last.manifest.weights[name]:
                log.warning("a whole version is published: its parent's weights are not there", file=name)
                return None
            if not write_delta(older / name, folder / name, folder / delta_name(name), most):
                return None
            most -= (folder / delta_name(name)).stat().st_size
        return DeltaOf(last.manifest.version, last.sha256)
