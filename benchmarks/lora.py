"""Adapters compared with all weights: the memory of an optimizer step, and the size of a version on disk.

    python -m benchmarks.lora

A separate process for each kind makes one PPO update of the same batch of the same model, in float32 on one thread.
Memory is the process' peak resident memory above its memory after the same update of a tiny model, which loads the
libraries, less one copy of the base's weights. Another process prepares the rows and version 0. A version's bytes are
those of its folder's weights, as a share of version 0's.

An adapter of rank r over layers of i inputs and o outputs has r Σ(i + o) numbers to their Σ i o, in the base's type:
a share of about 2r / width for square layers. So there are three models: "narrow" has six layers that are 384 wide,
"wide" two that are 640 wide, both 10 M parameters, and "one layer" a layer like those of Qwen2.5-0.5B, 896 wide.
"""

from __future__ import annotations

import contextlib
import gc
import json
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.reload.model import ONE_LAYER, SMALL, WIDE, Shape, make_model
from shared.config import Config
from shared.process import die_with_parent

if TYPE_CHECKING:
    from trainer_service.learner import Learner

RANK = 8
BATCH = "batch.pickle"
TINY = Shape(1, 64, 128, 2, 2)
SHAPES = {"narrow": SMALL, "wide": WIDE, "one layer": ONE_LAYER}
KINDS: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "lora": {"kind": "lora", "lora": {"rank": RANK}},
    "lora, attention alone": {
        "kind": "lora",
        "lora": {"rank": RANK, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    },
}


def main() -> None:
    """Print the figures as JSON."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model, shape in SHAPES.items():
            base = make_model(Path(folder) / model, shape=shape)
            found[model] = compare(base, Path(folder))
    print(json.dumps({"rank": RANK, **found}, indent=1))


def compare(base: Path, folder: Path) -> dict[str, Any]:
    """Run each kind in its own process, over one base model."""
    found: dict[str, Any] = {}
    for number, name in enumerate(KINDS):
        tiny, root, tiny_root = folder / "tiny", folder / f"{base.name} {number}", folder / f"tiny {base.name} {number}"
        prepare(name, make_model(tiny, shape=TINY), tiny_root)
        prepare(name, base, root)
        paths = [str(path) for path in (tiny, tiny_root, base, root)]
        command = [sys.executable, "-m", "benchmarks.lora", name, *paths]
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            preexec_fn=die_with_parent(),
        )
        found[name] = json.loads(ended.stdout.splitlines()[-1])
    for figures in found.values():
        figures["memory_share"] = round(figures["memory_bytes"] / found["full"]["memory_bytes"], 3)
        figures["version_share"] = round(figures["version_bytes"] / found["full"]["version_bytes"], 4)
    return found


def prepare(kind: str, base: Path, root: Path) -> None:
    """Write version 0 and the batch, which both load models."""
    from shared.ledger.connect import Ledger
    from tests.support.experiences import make_experiences
    from trainer_service.base_version import ensure_base_version

    config = _config(kind, base, root)
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger:
        ensure_base_version(config, ledger)
    (root / BATCH).write_bytes(pickle.dumps(make_experiences(base, 8, reply_tokens=32)))


def _config(kind: str, base: Path, root: Path) -> Config:
    model = {"path": str(base), **KINDS[kind]}
    return Config.model_validate({"root_dir": str(root), "model": model, "trainer": {"epochs": 1}})


def measure(kind: str, tiny: Path, tiny_root: Path, base: Path, root: Path) -> dict[str, int]:
    """Make one update and one version of what was prepared, in this process."""
    from shared.versions import version_path

    update(kind, tiny, tiny_root)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _status("VmRSS")
    learner = update(kind, base, root)
    most = _status("VmHWM")
    learner.write_version(root, version=1, parent=0, step=1)
    weights = _bytes(root / version_path(0))
    return {"memory_bytes": most - before - weights, "version_bytes": _bytes(root / version_path(1))}


def update(kind: str, base: Path, root: Path) -> Learner:
    """Make one update by the prepared batch."""
    import torch

    from services.trainer import build_update
    from shared.versions import version_path
    from tests.support.batches import rows_batch
    from trainer_service.learner import Learner
    from trainer_service.ranks import join_ranks

    torch.set_num_threads(1)
    config = _config(kind, base, root)
    rows = pickle.loads((root / BATCH).read_bytes())
    ranks = join_ranks(60)
    learner = Learner(lambda: build_update(config, root / version_path(0), ranks), ranks)
    learner._update.update(rows_batch(rows), step=0, version=0)
    return learner


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1], *map(Path, sys.argv[2:]))))
    else:
        main()
