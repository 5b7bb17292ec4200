"""`flywheel export-model`: writes a version as a folder for other tools, and proves it by its probe first.

An adapter is written in PEFT's format, or merged: W + alpha / rank · B · A in float32, rounded once to the type of
version 0. One tensor is in memory at a time, until the probe is computed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from explorer_service.reload.probe import TABLE, Gap
from services.new_folder import new_folder
from shared.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    a_name,
    b_name,
    read_adapter_config,
    require_adapter,
    write_adapter_config,
)
from shared.chain import copy_version, read_chain
from shared.config import Config
from shared.errors import ConfigError, StartupError, VersionError
from shared.experience import Purpose, VersionState
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import VersionRow, list_versions
from shared.probe import Probe
from shared.process import process_name
from shared.tensors import INDEX, read_tensors
from shared.versions import MANIFEST, verify_version, version_path

if TYPE_CHECKING:
    from torch import Tensor

LONGEST_EXPORT_S = 86_400.0


def export_model(config: Config, version: int, target: Path, *, merged: bool) -> Gap:
    """Write a version into a new folder. Returns the difference between its probe and the trainer's.

    Raises ConfigError for an existing target or a version that cannot be merged, StartupError for a version that is
    missing, damaged, or computes something else when it is read back; the target is then removed.
    """
    with (
        new_folder(target) as part,
        closing(Ledger.open(config.ledger_url, create=False)) as ledger,
        _leased_version(ledger, version) as row,
    ):
        if merged and row.kind != "lora":
            raise ConfigError(f"--merged is for adapters, and version {version} holds all weights; leave it out")
        try:
            return _write_verified(config.root, row, part, merged)
        except VersionError as exc:
            raise StartupError(f"version {version} cannot be exported: {exc}; restore its folder") from exc


@contextmanager
def _leased_version(ledger: Ledger, version: int) -> Iterator[VersionRow]:
    """Yield a version whose files are leased while they are read, but not for longer than an export takes: it may die.

    Raises StartupError.
    """
    reader, owner = f"export {process_name()}", process_name()
    rows = {row.version: row for row in ledger.fetch(list_versions)}
    with ledger.write() as connection:
        held = (
            version in rows
            and rows[version].has_files
            and transitions.lease_version(
                connection, version, reader=reader, purpose=Purpose.EXPORT, owner=owner, lasts_s=LONGEST_EXPORT_S
            )
        )
    if not held:
        there = ", ".join(str(row.version) for row in rows.values() if row.has_files)
        state = "does not exist"
        if version in rows:
            is_reserved = rows[version].state == VersionState.RESERVED
            state = "is not published yet" if is_reserved else "has no files any more"
        raise StartupError(f"version {version} {state}; versions with files: {there or 'none'}")
    try:
        yield rows[version]
    finally:
        with ledger.write() as connection:
            transitions.release_version(connection, reader=reader, purpose=Purpose.EXPORT)


def _write_verified(root: Path, row: VersionRow, part: Path, merged: bool) -> Gap:
    """Write the files and recompute the probe from them. Raises VersionError."""
    base = root / version_path(0)
    if row.kind == "full":
        probe = copy_version(read_chain(root, row.version, row.manifest_sha256), part).probe
        (part / MANIFEST).unlink()
    else:
        folder = root / row.path
        manifest = verify_version(folder, row.manifest_sha256)
        require_adapter(folder, read_tensors(base), manifest.base_fingerprint)
        write = _write_merged if merged else write_adapter
        write(folder, base, part, manifest.base)
        probe = manifest.probe
    gap = _measure(part, base, probe)
    allowed = TABLE.get(probe.rounding_of(probe.dtype), TABLE["bfloat16"])
    if not gap.is_within(allowed):
        raise VersionError(
            f"its files were written, and compute other logprobs than its probe: off by {gap.largest:.4g}, "
            f"{gap.mean:.4g} on average (allowed: {allowed.per_token:g} and {allowed.mean:g})"
        )
    return gap


def write_adapter(folder: Path, base: Path, part: Path, base_path: str) -> None:
    """Write the adapter with the base model's path, for PEFT, and the tokenizer."""
    from trainer_service.publish import copy_files

    shutil.copyfile(folder / ADAPTER_WEIGHTS, part / ADAPTER_WEIGHTS)
    write_adapter_config(part, msgspec.structs.replace(read_adapter_config(folder), base_model_name_or_path=base_path))
    copy_files(base, part, without={"config.json", "generation_config.json", INDEX})


def _write_merged(folder: Path, base: Path, part: Path, _: str) -> None:
    """Write version 0 with the adapter's product added to its weights."""
    from safetensors import safe_open

    from trainer_service.publish import copy_files
    from trainer_service.tensor_files import copy_header, write_tensors

    config = read_adapter_config(folder)
    scale = config.lora_alpha / config.r
    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as adapter:
        names = set(adapter.keys())

        def merge(read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
            def merged(name: str) -> Tensor:
                module, weight = name.removesuffix(".weight"), read(name)
                if a_name(module) not in names:
                    return weight
                a_RI: Tensor = adapter.get_tensor(a_name(module)).float()
                b_OR: Tensor = adapter.get_tensor(b_name(module)).float()
                return weight.float() + scale * (b_OR @ a_RI)

            return merged

        for file in sorted(base.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                write_tensors(part / file.name, *copy_header(file), merge(tensors.get_tensor))
    copy_files(base, part)


def _measure(part: Path, base: Path, probe: Probe) -> Gap:
    """Compute the probe from a written folder, as its readers will: by PEFT on version 0, or by Transformers."""
    from trainer_service.adapters import open_adapter
    from trainer_service.models import load_causal_lm
    from trainer_service.publish import compute_probe

    model = open_adapter(base, part) if (part / ADAPTER_CONFIG).exists() else load_causal_lm(part)
    found = compute_probe(model, [sequence.token_ids for sequence in probe.sequences])
    pairs = zip(found, probe.sequences, strict=True)
    gaps = [abs(a - b) for own, expected in pairs for a, b in zip(own.logprobs, expected.logprobs, strict=True)]
    return Gap(max(gaps), sum(gaps) / len(gaps))
