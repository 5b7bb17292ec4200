"""vLLM's arguments for versions that are adapters, and the adapter for its warm-up."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.adapters import ADAPTER_WEIGHTS, AdapterConfig, a_name, b_name, is_target, write_adapter_config
from shared.config import Config
from shared.errors import StartupError
from shared.tensors import Tensor, make_header, read_tensors

_IN_A_LAYER = re.compile(r"\.\d+\..*\.weight$")
_TYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class WarmUpAdapters:
    """An adapter of zeros, to be loaded `count` times."""

    folder: Path  # exists while the engine runs
    count: int
    keeps_last: bool  # whether the last one stays in its slot permanently


def adapter_arguments(config: Config, base: Path, *, on_cpu: bool) -> list[str]:
    """Return vLLM's arguments; none if versions contain all weights. base: the folder that the engine is started on.

    vLLM is told which layers adapters change. Otherwise it prepares the output layer of most models for adapters, too,
    and then dies on a CPU when it scores a prompt, as each proof does. Raises StartupError if there is no such layer.

    On a CPU, vLLM 0.32 computes a request for the base with the adapter in its last slot if another request of the
    batch has an adapter (vLLM #48421). So there is a slot for each loaded adapter, and one more at the end, which
    always contains an adapter of zeros.
    """
    if config.model.kind != "lora":
        return []
    held, engine = config.engine.versions_held, config.engine
    numbers = {
        "--max-loras": held + 1 if on_cpu else engine.max_loras,
        "--max-cpu-loras": held + 1 if on_cpu else held,
        "--max-lora-rank": config.model.lora.engine_rank,
    }
    layers = _last_parts(_adapted_layers(config, read_tensors(base)))
    if not layers:
        raise StartupError(f"model.lora.targets={config.model.lora.targets!r} names no linear layer of {base}")
    limits = [part for name, number in numbers.items() for part in (name, str(number))]
    return ["--enable-lora", *limits, "--lora-target-modules", *layers]


@contextlib.contextmanager
def warm_up_adapters(config: Config, base: Path, *, on_cpu: bool) -> Iterator[WarmUpAdapters | None]:
    """Yield the adapters for a warm-up: two or, on a CPU, one for each slot. None: versions are not adapters.

    base: the folder that the engine is started on.
    """
    if config.model.kind != "lora":
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="flywheel-adapter-") as name:
        write_zeros(config, read_tensors(base), Path(name))
        yield WarmUpAdapters(Path(name), config.engine.versions_held + 1 if on_cpu else 2, keeps_last=on_cpu)


def write_zeros(config: Config, base: dict[str, Tensor], folder: Path) -> None:
    """Write an adapter that changes nothing: a sparse file without data."""
    lora, layers = config.model.lora, _adapted_layers(config, base)
    layout: dict[str, Tensor] = {}
    for name, (saved, (outputs, inputs)) in layers.items():
        dtype = saved if saved in _TYPES else "BF16"
        layout[a_name(name)] = Tensor(dtype, (lora.rank, inputs))
        layout[b_name(name)] = Tensor(dtype, (outputs, lora.rank))
    header = make_header(layout)
    with (folder / ADAPTER_WEIGHTS).open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(tensor.data_bytes for tensor in layout.values()))
    targets = _last_parts(layers)
    write_adapter_config(
        folder, AdapterConfig(base_model_name_or_path="", r=lora.rank, lora_alpha=lora.alpha, target_modules=targets)
    )


def _adapted_layers(config: Config, base: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the linear layers that adapters change, by the layers' names."""
    targets = config.model.lora.targets
    layers = {
        name.removesuffix(".weight"): tensor
        for name, tensor in base.items()
        if len(tensor.shape) == 2 and _IN_A_LAYER.search(name)
    }
    if targets == "all-linear":
        return layers
    return {name: tensor for name, tensor in layers.items() if is_target(name, list(targets))}


def _last_parts(names: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})
