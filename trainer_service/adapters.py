"""LoRA adapters in a causal LM: one for the policy and, if an algorithm needs values, one for the critic.

Both share one frozen base. Only this file imports PEFT, which inserts its layers into the model in place: the model
keeps our attention and our head. One adapter is active during a forward pass; with none, the base model computes.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from shared.adapters import ADAPTER_WEIGHTS, AdapterConfig, a_name, b_name, is_target, read_adapter_config
from shared.config import LoraConfig
from shared.errors import StartupError, VersionError, first_line
from trainer_service.logprobs import Scores
from trainer_service.models import Actor, ValueHead, hidden_states, load_causal_lm
from trainer_service.packing import MicroBatch

POLICY, CRITIC = "policy", "critic"
ALL_LINEAR = "all-linear"


def add_adapters(model: Any, config: LoraConfig, names: list[str], seed: int) -> Adapters:
    """Insert adapters with these names into a model. They change nothing yet: each B is zero. Freezes the base.

    Raises StartupError for a target that is no linear layer of the model, or that engines do not adapt.
    """
    targets = config.targets if isinstance(config.targets, str) else list(config.targets)
    with torch.random.fork_rng(), warnings.catch_warnings():  # a rebuilt model gets the same A
        torch.manual_seed(seed)
        warnings.filterwarnings("ignore", "Already found a `peft_config`", UserWarning)  # a second adapter is intended
        for name in names:
            alpha: Any = config.alpha  # PEFT declares an int, but only multiplies by it
            settings = PeftConfig(r=config.rank, lora_alpha=alpha, target_modules=targets)
            try:
                inject_adapter_in_model(settings, model, name)
            except ValueError as exc:
                raise StartupError(
                    f"model.lora.targets={targets!r}: {first_line(exc)}; name linear layers of the model, or set "
                    f"{ALL_LINEAR}"
                ) from exc
    adapters = Adapters(model)
    adapters.require_served(targets)
    adapters.switch(POLICY)
    return adapters


def open_adapter(base: Path, folder: Path) -> Any:
    """Load a model folder with an adapter, in float32, by PEFT. Raises StartupError."""
    model = load_causal_lm(base)
    try:
        return PeftModel.from_pretrained(model, folder)
    except (OSError, ValueError, RuntimeError, SafetensorError) as exc:
        raise StartupError(f"the adapter in {folder} cannot be loaded ({first_line(exc)})") from exc


class Adapters:
    """The adapters of a model. PEFT's layers store which one is active."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._layers: dict[str, Any] = {
            name: layer for name, layer in model.named_modules() if isinstance(layer, BaseTunerLayer)
        }

    def __bool__(self) -> bool:
        return bool(self._layers)

    @property
    def current(self) -> str | None:
        """The active adapter."""
        layer = next(iter(self._layers.values()))
        return None if layer.disable_adapters else str(layer.active_adapters[0])

    def switch(self, name: str | None) -> None:
        """Activate another adapter; None: only the base. All stay trainable: PEFT would freeze inactive ones."""
        for layer in self._layers.values():
            layer.enable_adapters(name is not None)
            if name is not None:
                layer.set_adapter(name)
            layer.set_requires_grad(list(layer.lora_A))

    @contextlib.contextmanager
    def use(self, name: str | None) -> Iterator[None]:
        """Activate another adapter inside this block."""
        before = self.current
        if before == name:
            yield
            return
        self.switch(name)
        try:
            yield
        finally:
            self.switch(before)

    def checkpoint_contexts(self) -> tuple[Any, Any]:
        """For torch.utils.checkpoint: a layer is recomputed with the adapter of its forward pass."""
        return contextlib.nullcontext(), self.use(self.current)

    def parameters(self, name: str) -> list[nn.Parameter]:
        """All parameters of an adapter."""
        return [half[name].weight for layer in self._layers.values() for half in (layer.lora_A, layer.lora_B)]

    def weights(self) -> dict[str, nn.Parameter]:
        """The policy's adapter, by the names in a version's file."""
        return {
            label(name): half[POLICY].weight
            for name, layer in self._layers.items()
            for label, half in ((a_name, layer.lora_A), (b_name, layer.lora_B))
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the policy's adapter, not sharded."""
        return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in self.weights().items()}

    def describe(self, base: str) -> AdapterConfig:
        """Return adapter_config.json of the policy's adapter. base: identifies the base model."""
        layer = next(iter(self._layers.values()))
        rank, alpha = layer.r[POLICY], layer.lora_alpha[POLICY]
        return AdapterConfig(base_model_name_or_path=base, r=rank, lora_alpha=alpha, target_modules=self._targets())

    def _targets(self) -> list[str]:
        """Return the last parts of the adapted modules' names if they match no other module; else the whole names."""
        ends = sorted({name.rpartition(".")[2] for name in self._layers})
        others = (name for name, module in self._model.named_modules() if name not in self._layers)
        inside = tuple(f"{name}." for name in self._layers)
        return sorted(self._layers) if any(is_target(n, ends) and not n.startswith(inside) for n in others) else ends

    def load(self, folder: Path) -> None:
        """Load the policy's adapter from a version's folder. Raises StartupError."""
        try:
            stored, found = read_adapter_config(folder), load_file(folder / ADAPTER_WEIGHTS)
        except (OSError, SafetensorError, VersionError) as exc:
            raise StartupError(f"the adapter in {folder} cannot be loaded ({exc}); restore its folder") from exc
        mine = self.describe(stored.base_model_name_or_path)
        parameters = self.weights()
        if stored != mine or {n: t.shape for n, t in found.items()} != {n: p.shape for n, p in parameters.items()}:
            raise StartupError(
                f"the adapter in {folder} has rank {stored.r}, alpha {stored.lora_alpha:g} and targets "
                f"{', '.join(stored.target_modules)}, and model.lora makes rank {mine.r}, alpha {mine.lora_alpha:g} "
                f"and {', '.join(mine.target_modules)}; set these, or give the new ones another root_dir"
            )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(found[name])

    @contextlib.contextmanager
    def rounded(self, dtype: torch.dtype) -> Iterator[None]:
        """In this block, the policy's adapter computes with weights rounded to this type, as a version stores them."""
        layers = [half[POLICY] for layer in self._layers.values() for half in (layer.lora_A, layer.lora_B)]
        for layer in layers:
            layer.forward = partial(_forward_rounded, layer, dtype)
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward

    def require_served(self, targets: str | list[str]) -> None:
        """Raise StartupError unless every target is in the model, and engines can adapt every adapted layer."""
        for target in targets if isinstance(targets, list) else ():
            if not any(is_target(name, [target]) for name in self._layers):
                raise StartupError(
                    f"model.lora.targets: {target!r} is no linear layer of the model; the adapted ones are "
                    f"{', '.join(self._targets())}; correct it, or set {ALL_LINEAR}"
                )
        head = self._model.get_output_embeddings()
        for name, layer in self._layers.items():
            base = layer.get_base_layer()
            if not isinstance(base, nn.Linear) or layer is head or base is head:
                raise StartupError(
                    f"model.lora.targets: {name!r} is a {type(base).__name__} that engines do not adapt as the trainer "
                    "does; name other layers, or set model.kind: full"
                )


def _forward_rounded(layer: nn.Linear, dtype: torch.dtype, x: Tensor) -> Tensor:
    return nn.functional.linear(x, layer.weight.to(dtype).to(x.dtype))


class AdaptedActorCritic(Actor):
    """Policy and critic on one frozen base, each with its own adapter; the critic has a head."""

    def __init__(self, policy: Any, adapters: Adapters) -> None:
        super().__init__(policy)
        self._adapters = adapters
        self.value_head = ValueHead(policy.config.get_text_config().hidden_size)

    def forward(self, micro: MicroBatch, *, values: bool = True, **wanted: Any) -> Scores:
        """Like the actor's; with `values` also those of the critic."""
        scores = super().forward(micro, **wanted)
        if values:
            with self._adapters.use(CRITIC):
                hidden_KD = hidden_states(self.policy.base_model, micro)
            scores["values"] = self.value_head(hidden_KD)
        return scores

    def critic_parameters(self) -> list[nn.Parameter]:
        return [*self._adapters.parameters(CRITIC), *self.value_head.parameters()]


def base_scores(adapters: Adapters, score: Callable[[MicroBatch], Scores], micro: MicroBatch) -> Scores:
    """Return scores by the base model alone."""
    with adapters.use(None):
        return score(micro)
