"""Stage 8, publish: weights become a version, complete on disk first, then a row.

A version holds all weights untied: engines reload tied ones wrongly, and silently (vLLM 0.32 keeps the old lm_head).
So version 0 is the base model with its output embedding written out, and everything after it is trained from that.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sqlalchemy.exc import IntegrityError

from shared.config import Config
from shared.errors import StartupError, VersionError
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import list_versions
from shared.log import StageLogger
from shared.versions import (
    MANIFEST,
    Manifest,
    Probe,
    ProbeSequence,
    fingerprint,
    read_manifest,
    version_path,
    write_version,
)
from trainer_service.logprobs import token_logprobs
from trainer_service.models import load_causal_lm

log = StageLogger("publish")

PROBE_SEQUENCES = 4
PROBE_LENGTH = 24  # tokens
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


def ensure_base_version(config: Config, ledger: Ledger) -> None:
    """Publish version 0, the base model, unless it stands. Engine and trainer may both do this at once.

    Raises StartupError when the model folder is missing or broken, or when the root folder began with another model.
    """
    model_folder = Path(config.model.path)
    (config.root / "versions").mkdir(parents=True, exist_ok=True)
    with _only_one(config.root / "versions" / ".base.lock"):
        with ledger.read() as connection:
            stands = any(row.version == 0 for row in list_versions(connection))
        if stands:
            _require_same_base(config, model_folder)
            return
        model = load_causal_lm(model_folder)
        saved_dtype = saved_type(model_folder)
        untie(model)
        write_full_version(
            config.root,
            model,
            model_folder,
            version=0,
            parent=None,
            step=0,
            dtype=saved_dtype,
            base=_base(model_folder),
        )
        try:
            with ledger.write() as connection:
                transitions.publish(connection, version=0, parent=None, kind="full", step=0)
        except IntegrityError:
            return  # another machine was first, with the same model
        log.info("base model published", version=0, path=str(model_folder), dtype=_name(saved_dtype))


def untie(model: Any) -> None:
    """Give the output embedding weights of its own, equal to the input embedding's, and say so in the config."""
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        tied = bool(getattr(config, "tie_word_embeddings", False))
        config.tie_word_embeddings = False
        if tied:
            head = model.get_output_embeddings()
            head.weight = torch.nn.Parameter(head.weight.detach().clone())


def saved_type(folder: Path) -> torch.dtype:
    """The type in which a model folder stores its weights, as its config says; float32 when it does not."""
    from transformers import AutoConfig

    dtype = getattr(AutoConfig.from_pretrained(folder, local_files_only=True), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def write_full_version(
    root: Path,
    model: Any,
    sidecar: Path,
    *,
    version: int,
    parent: int | None,
    step: int,
    dtype: torch.dtype,
    base: tuple[str, str],
) -> Manifest:
    """Write all weights of `model` as a version's folder, with a probe of the weights as written.

    sidecar: folder whose tokenizer, templates and generation settings belong to the model.
    base: the base model's path and fingerprint. Raises VersionError.
    """
    probe = Probe(_name(dtype), compute_probe(_as_written(model, dtype)))
    manifest = Manifest(version, parent, "full", base[0], base[1], step, time.time(), {}, probe)

    def write_files(folder: Path) -> None:
        weights = {name: tensor.detach().to(dtype).contiguous() for name, tensor in model.state_dict().items()}
        config_dtype = model.config.dtype
        model.config.dtype = dtype
        try:
            model.save_pretrained(folder, state_dict=weights)
        finally:
            model.config.dtype = config_dtype
        for file in sidecar.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHTS) and file.name not in (MANIFEST, "config.json"):
                shutil.copyfile(file, folder / file.name)

    return write_version(root, manifest, write_files)


def _as_written(model: Any, dtype: torch.dtype) -> Any:
    """The model with its weights rounded as they are written: a copy, unless rounding changes nothing."""
    if dtype == torch.float32:
        return model
    return copy.deepcopy(model).to(dtype).to(torch.float32)


@torch.no_grad()
def compute_probe(model: Any) -> list[ProbeSequence]:
    """Fixed token sequences and the model's logprobs of them at temperature 1, in float32."""
    model.eval()
    vocabulary = model.get_input_embeddings().weight.shape[0]
    device = next(model.parameters()).device
    draw = np.random.default_rng(0)
    ids_BT = torch.from_numpy(
        draw.integers(0, min(vocabulary, model.config.get_text_config().vocab_size), (PROBE_SEQUENCES, PROBE_LENGTH))
    ).to(device)
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits.float()
    logprobs = token_logprobs(logits_BTV[:, :-1], ids_BT[:, 1:])
    return [ProbeSequence(ids, values) for ids, values in zip(ids_BT.tolist(), logprobs.tolist(), strict=True)]


def _require_same_base(config: Config, model_folder: Path) -> None:
    """Version 0 must have come from the model that the configuration names."""
    try:
        manifest = read_manifest(config.root / version_path(0))
    except VersionError as exc:
        raise StartupError(f"version 0 stands in the ledger and its folder is damaged ({exc}); restore it") from exc
    if (model_folder / "config.json").exists() and fingerprint(model_folder) != manifest.base_fingerprint:
        raise StartupError(
            f"root_dir={str(config.root)!r} began with the model {manifest.base!r}, and model.path names another one, "
            f"{str(model_folder)!r}; give the new model a root_dir of its own"
        )


def _base(folder: Path) -> tuple[str, str]:
    return str(folder), fingerprint(folder)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def _only_one(file: Path) -> Iterator[None]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
