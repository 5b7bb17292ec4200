"""The files of a version of the kind `lora`, as PEFT writes and vLLM reads them, and their checks.

The folder contains `adapter_model.safetensors`, `adapter_config.json` and MANIFEST.json; the tokenizer is in version 0.
Each adapted module has tensors A [rank, inputs] and B [outputs, rank]; its weight becomes W + alpha / rank · B · A
(Hu et al. 2021, arXiv 2106.09685, section 4.1).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from shared.errors import VersionError, VersionMissing
from shared.tensors import Tensor, read_header

if TYPE_CHECKING:
    from shared.versions import Manifest

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
PREFIX = "base_model.model."  # prefix of a module's name in the weights file
_MAX_CONFIG_BYTES = 4 * 1024 * 1024


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """adapter_config.json: what PEFT needs to load the adapter. Other settings have PEFT's defaults."""

    base_model_name_or_path: str  # in a version, the base model's fingerprint; in an export, its path
    r: int
    lora_alpha: float
    target_modules: list[str]  # names of modules in the base model, or the last parts of names
    peft_type: Literal["LORA"] = "LORA"
    task_type: Literal["CAUSAL_LM"] = "CAUSAL_LM"
    bias: Literal["none"] = "none"
    lora_dropout: Literal[0] = 0
    fan_in_fan_out: Literal[False] = False
    inference_mode: Literal[True] = True


_decode_config = msgspec.json.Decoder(AdapterConfig).decode
_decode_keys = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def write_adapter_config(folder: Path, config: AdapterConfig) -> None:
    """Write adapter_config.json. Raises OSError."""
    (folder / ADAPTER_CONFIG).write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=1))


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read adapter_config.json.

    Raises VersionError for anything but a plain LoRA adapter of linear layers, as `write_adapter_config` writes it;
    VersionMissing if the file cannot be read.
    """
    file = folder / ADAPTER_CONFIG
    try:
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise VersionError(f"{folder}: {ADAPTER_CONFIG} has more than {_MAX_CONFIG_BYTES} bytes")
        encoded = file.read_bytes()
        keys = _decode_keys(encoded).keys()
        config = _decode_config(encoded)
    except OSError as exc:
        raise VersionMissing(f"{folder}: {ADAPTER_CONFIG} cannot be read ({exc.strerror})") from exc
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise VersionError(f"{folder}: {ADAPTER_CONFIG} is damaged ({exc})") from exc
    if unknown := sorted(keys - set(AdapterConfig.__struct_fields__)):
        raise VersionError(f"{folder}: {ADAPTER_CONFIG} sets {unknown[0]!a}, which no adapter of Flywheel has")
    return config


def require_adapter(folder: Path, base: dict[str, Tensor], fingerprint: str) -> None:
    """Check an adapter's configuration and tensors against the base model's. Raises VersionError with the first fault.

    If a tensor is missing, engines keep the old one without an error, so every target must have both of its tensors.
    """
    config = read_adapter_config(folder)
    if config.base_model_name_or_path != fingerprint:
        raise VersionError(f"{folder}: {ADAPTER_CONFIG} names another base model than version 0")
    found = read_header(folder / ADAPTER_WEIGHTS)
    expected: dict[str, tuple[int, ...]] = {}
    for name, tensor in base.items():
        module = name.removesuffix(".weight")
        if module != name and is_target(module, config.target_modules):
            if len(tensor.shape) != 2:
                raise VersionError(f"{folder}: {ADAPTER_CONFIG} names {module!a}, which is no linear layer")
            expected |= {a_name(module): (config.r, tensor.shape[1]), b_name(module): (tensor.shape[0], config.r)}
    for name in sorted(found.keys() | expected.keys()):
        if name not in found:
            raise VersionError(f"{folder}: tensor {name!a} is missing, and {ADAPTER_CONFIG} names its module")
        if name not in expected:
            raise VersionError(f"{folder}: tensor {name!a} is of no module that {ADAPTER_CONFIG} names")
        if found[name].shape != expected[name] or found[name].dtype not in ("F32", "BF16", "F16"):
            raise VersionError(f"{folder}: tensor {name!a} is {found[name]}, and should be {list(expected[name])}")


def is_target(module: str, targets: list[str]) -> bool:
    """Whether a module's name, or its last parts, are among the targets: PEFT's rule."""
    return any(module == target or module.endswith(f".{target}") for target in targets)


def a_name(module: str) -> str:
    """Return the name of a module's A in the weights file."""
    return f"{PREFIX}{module}.lora_A.weight"


def b_name(module: str) -> str:
    """Return the name of a module's B in the weights file."""
    return f"{PREFIX}{module}.lora_B.weight"


def adapter_name(model: str, version: int, manifest_sha256: str | None) -> str:
    """Return the name under which engines load a version's adapter, such as `agent@12+9f86d081`.

    It is never used for another adapter: vLLM caches KV by the name, and never invalidates it.
    """
    return f"{model}@{version}+{(manifest_sha256 or '')[:8]}"


def adapter_version(model: str, name: str) -> int | None:
    """Return the version whose adapter an engine loaded under such a name; None for other names."""
    found = re.fullmatch(re.escape(model) + r"@(\d{1,9})\+[0-9a-f]{0,8}", name)
    return None if found is None else int(found[1])


def contradiction_of_kind(manifest: Manifest) -> str | None:
    """Return how a manifest contradicts its kind; None: it does not."""
    probe = manifest.probe
    if manifest.kind != "lora":
        lone = manifest.base_version is not None or probe.base
        return f"it is of the kind {manifest.kind!a}, and names a base as an adapter does" if lone else None
    if manifest.base_version is None or manifest.base_version >= manifest.version:
        return "it is an adapter, and does not say of which earlier version"
    if manifest.form != "whole" or set(manifest.files) != {ADAPTER_WEIGHTS, ADAPTER_CONFIG}:
        return f"it is an adapter, and its files are {sorted(manifest.files)}"
    if [one.token_ids for one in probe.base] != [one.token_ids for one in probe.sequences]:
        return "it is an adapter, and its probe of the base is of other tokens"
    if any(len(base.logprobs) != len(own.logprobs) for base, own in zip(probe.base, probe.sequences, strict=True)):
        return "it is an adapter, and its probe of the base has another number of logprobs"
    return None
