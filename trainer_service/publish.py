"""Stage 8, publish: write weights as a version, first a complete folder on disk, then a row in the ledger.

Versions store all weights untied, because vLLM 0.32 reloads tied weights wrongly without an error: it keeps the old
lm_head. Version 0 is the base model with its output embedding written out; later versions are trained from it. Models
without an lm_head in vLLM stay tied.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from shared.probe import Probe, ProbeSequence
from shared.soundness import is_foreign
from shared.tensors import INDEX, read_tensors, require_same_tensors
from shared.versions import MANIFEST, Manifest, fingerprint, manifest_sha256, read_manifest, version_path, write_version
from trainer_service.disk import as_os_error
from trainer_service.logprobs import token_logprobs
from trainer_service.models import load_causal_lm, round_weights
from trainer_service.tensor_files import copy_header, write_tensors

PROBE_SEQUENCES = 8
PROBE_LENGTH = 24  # tokens
_ALWAYS_TIED = frozenset({"gemma2"})  # types of models for which vLLM has no lm_head, and refuses one
_NAMED_TEMPLATES = "additional_chat_templates/*.jinja"  # for requests with tools, for example


def untie(model: Any) -> None:
    """Give the output embedding its own copy of the input embedding's weights, and mark the config as untied.

    Has no effect on a model that engines only serve tied.
    """
    if model.config.model_type in _ALWAYS_TIED:
        return
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        tied = bool(getattr(config, "tie_word_embeddings", False))
        config.tie_word_embeddings = False
        if tied:
            head = model.get_output_embeddings()
            head.weight = torch.nn.Parameter(head.weight.detach().clone())


def saved_type(folder: Path) -> torch.dtype:
    """Return the dtype of a model folder's weights according to its config; float32 if the config names none."""
    from transformers import AutoConfig

    dtype = getattr(AutoConfig.from_pretrained(folder, local_files_only=True), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def write_base_version(root: Path, model_folder: Path) -> Manifest:
    """Write version 0. Raises ConfigError, StartupError, VersionError."""
    model = load_causal_lm(model_folder)
    dtype = saved_type(model_folder)
    untie(model)
    round_weights(model, dtype)  # to the precision in which version 0 is stored
    round_weights(model, torch.float32)
    probe = Probe(pytorch_name(dtype), compute_probe(model, sample_sequences(model)))
    base = (str(model_folder), fingerprint(model_folder))

    def write_files(folder: Path) -> None:
        model.to(dtype).config.dtype = dtype
        try:
            model.save_pretrained(folder)
        except (SafetensorError, RuntimeError) as exc:
            raise as_os_error(exc) from None
        copy_files(model_folder, folder, without={"config.json", INDEX})

    return write_version(root, Manifest(0, None, "full", *base, 0, time.time(), {}, probe), write_files)


def write_full_version(
    root: Path,
    read: Callable[[str], torch.Tensor],
    probe: Probe,
    *,
    version: int,
    parent: int,
    step: int,
    shrink: Callable[[Path, Manifest], Manifest] | None = None,
) -> Manifest:
    """Write a version whose files have the layout of version 0's; only the weights differ.

    read: returns a weight by its name in version 0; called once for each weight, in file order. probe: of these
    weights. shrink: see `write_version`.
    Raises VersionError, and removes the folder, if a weight's shape is not version 0's or the disk cannot be written.
    """
    base = root / version_path(0)
    first = read_manifest(base)
    of = (first.base, first.base_fingerprint)
    manifest = Manifest(version, parent, "full", *of, step, time.time(), {}, probe)

    def write_files(folder: Path) -> None:
        for file in _weight_files(base):
            write_tensors(folder / file.name, *copy_header(file), read)
        require_same_tensors(folder, read_tensors(folder), read_tensors(base))
        copy_files(base, folder)

    return write_version(root, manifest, write_files, shrink)


def weight_names(root: Path) -> list[str]:
    """Return the names of all weights in the order in which `write_full_version` reads them."""
    return [name for file in _weight_files(root / version_path(0)) for name in copy_header(file)[1]]


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def as_published(root: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the ledger's columns about a version's files: digest of the manifest, size, and the base of a delta."""
    size = sum(entry.size for entry in manifest.files.values())
    digest = manifest_sha256(root / version_path(manifest.version))
    return {"manifest_sha256": digest, "size": size, "delta_of": manifest.of.version if manifest.of else None}


def copy_files(source: Path, folder: Path, without: Collection[str] = ()) -> None:
    """Copy tokenizer, templates and settings: all files but weights, the manifest, foreign files and `without`."""
    for file in (*source.iterdir(), *source.glob(_NAMED_TEMPLATES)):
        other = file.name in without or file.name == MANIFEST or file.suffix == ".safetensors"
        if file.is_file() and not other and not is_foreign(file):
            target = folder / file.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)


def probe_sequences(root: Path) -> list[list[int]]:
    """Return the token sequences of version 0's probe, which every version uses. Raises VersionError."""
    return [sequence.token_ids for sequence in read_manifest(root / version_path(0)).probe.sequences]


@torch.no_grad()
def sample_sequences(model: Any, count: int = PROBE_SEQUENCES, length: int = PROBE_LENGTH) -> list[list[int]]:
    """Sample sequences from the model with a fixed seed. Engines compute such tokens precisely: they serve them.

    Returns `count` sequences of `length` tokens: the first token is uniform, the others have temperature 1.
    Each token after the first takes a forward pass, for which ZeRO stage 3 gathers all weights.
    """
    model.eval()
    vocabulary, device = _vocabulary(model), next(model.parameters()).device
    draw = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(vocabulary, (count, 1), generator=draw)
    while ids_BT.shape[1] < length:
        logits_BV = model(input_ids=ids_BT.to(device), use_cache=False).logits[:, -1, :vocabulary].float().cpu()
        ids_BT = torch.cat((ids_BT, torch.multinomial(logits_BV.softmax(-1), 1, generator=draw)), dim=1)
    return [[int(token) for token in ids] for ids in ids_BT]


@torch.no_grad()
def compute_probe(model: Any, sequences: list[list[int]]) -> list[ProbeSequence]:
    """Return the model's logprobs of token sequences of equal length, at temperature 1, in float32."""
    model.eval()
    ids_BT = torch.tensor(sequences, device=next(model.parameters()).device)
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits.float()
    logprobs = token_logprobs(logits_BTV[:, :-1], ids_BT[:, 1:])
    return [ProbeSequence(ids, values) for ids, values in zip(sequences, logprobs.tolist(), strict=True)]


def _vocabulary(model: Any) -> int:
    return min(int(model.get_input_embeddings().num_embeddings), int(model.config.get_text_config().vocab_size))


def pytorch_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in PyTorch."""
    return str(dtype).removeprefix("torch.")
