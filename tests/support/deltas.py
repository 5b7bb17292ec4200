"""Versions with weights of some size, published like a trainer's: whole, or as deltas of each other."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from shared.probe import Probe, ProbeSequence
from shared.versions import Manifest, version_path, write_version
from trainer_service.delta import DeltaMaker

FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
PROBE = Probe("float32", [ProbeSequence([5, 6, 7], [-1.0, -1.0])])


class Weights:
    """Weights of 16 bits in two files; each version changes a share of them."""

    def __init__(self, root: Path, anchor_every: int = 16, count: int = 20_000) -> None:
        self.root = root
        self.maker = DeltaMaker(root, root / "last-weights", anchor_every)
        self._random = np.random.default_rng(0)
        self._bits = {name: self._random.integers(0, 2**16, count, np.uint16) for name in FILES}

    def publish(self, version: int, share: float = 0.01, parent: int | None = -1) -> Manifest:
        """Write a version. Its parent is the one before, unless given."""
        parent = parent if parent != -1 else version - 1 if version else None
        manifest = Manifest(version, parent, "full", "base", "", version, time.time(), {}, PROBE)
        for bits in self._bits.values():
            bits[self._random.random(bits.size) < share] += 1

        def write_files(folder: Path) -> None:
            (folder / "config.json").write_text(f'{{"version": {version}}}')
            for name, bits in self._bits.items():
                save_file({f"{name}.weight": bits.view(np.float16)}, folder / name)

        return write_version(self.root, manifest, write_files, self.maker.shrink)

    def folder(self, version: int) -> Path:
        return self.root / version_path(version)


def contents(folder: Path) -> dict[str, str]:
    """The sha256 of each file except the manifest."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
        if file.is_file() and file.name != "MANIFEST.json"
    }
