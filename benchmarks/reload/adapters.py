"""Random adapters in the trainer's format, over every linear layer except the output layer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.adapters import ADAPTER_WEIGHTS, AdapterConfig, a_name, b_name, write_adapter_config
from shared.config import Config
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.probe import Probe
from shared.versions import Manifest, read_manifest, version_path, write_version

SEQUENCES = 4  # of a probe, as the trainer writes it


class AdapterPublisher:
    """Writes versions of the kind `lora`; each is another random change of the base."""

    def __init__(self, config: Config, ledger: Ledger, size: float = 0.02) -> None:
        """size: the scale of B's numbers."""
        from trainer_service.models import load_causal_lm

        self._config = config
        self._ledger = ledger
        self._size = size
        self._model = load_causal_lm(config.root / version_path(0))
        self._base = read_manifest(config.root / version_path(0))
        self.version = 0  # the last prepared one
        self._about: dict[str, Any] = {}
        self.row_at = 0.0  # time.monotonic() before the commit of the last version's row

    def prepare(self) -> int:
        """Write the next version's folder, which has no effect before `publish`. Returns its number."""
        from trainer_service.publish import as_published, compute_probe

        with self._ledger.write() as connection:
            self.version = transitions.reserve_version(connection, writer="trainer")
        weights = self._tensors(self.version)
        lora, base = self._config.model.lora, self._base
        alone = base.probe.sequences[:SEQUENCES]
        with self.adapted(self.version) as model:
            probe = compute_probe(model, [sequence.token_ids for sequence in alone])
        numbers = {"version": self.version, "parent": self.version - 1, "step": self.version}
        manifest = Manifest(
            **numbers,
            kind="lora",
            base=base.base,
            base_fingerprint=base.base_fingerprint,
            created_at=time.time(),
            files={},
            probe=Probe(base.probe.dtype, probe, base=alone),
            base_version=0,
        )
        targets = sorted({name.rpartition(".")[2] for name, _ in self._modules()})
        config = AdapterConfig(
            base_model_name_or_path=base.base_fingerprint, r=lora.rank, lora_alpha=lora.alpha, target_modules=targets
        )

        def write(folder: Path) -> None:
            from safetensors.torch import save_file

            save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
            write_adapter_config(folder, config)

        self._about = as_published(self._config.root, write_version(self._config.root, manifest, write))
        return self.version

    def publish(self) -> int:
        """Make the prepared version official. Returns its number."""
        version = self.version
        about = {"parent": version - 1, "kind": "lora", "step": version, "trainer": "trainer", **self._about}
        with self._ledger.write() as connection:
            transitions.publish(connection, version=version, **about)
            self.row_at = time.monotonic()
        return version

    def _modules(self) -> list[tuple[str, Any]]:
        from torch import nn

        found = [(name, module) for name, module in self._model.named_modules() if isinstance(module, nn.Linear)]
        return [(name, module) for name, module in found if not name.endswith("lm_head")]

    @contextlib.contextmanager
    def adapted(self, version: int) -> Iterator[Any]:
        """In the block: the base with a version's product added to its weights, in float32."""
        import torch

        lora, tensors, modules = self._config.model.lora, self._tensors(version), self._modules()
        kept = [module.weight.detach().clone() for _, module in modules]
        with torch.no_grad():
            for name, module in modules if version else ():
                module.weight += lora.alpha / lora.rank * tensors[b_name(name)] @ tensors[a_name(name)]
        try:
            yield self._model
        finally:
            with torch.no_grad():
                for (_, module), weight in zip(modules, kept, strict=True):
                    module.weight.copy_(weight)

    def _tensors(self, version: int) -> dict[str, Any]:
        """A version's adapter, always the same."""
        import torch

        rank, tensors, draw = self._config.model.lora.rank, {}, torch.Generator().manual_seed(version)
        for name, module in self._modules():
            outputs, inputs = module.weight.shape
            tensors[a_name(name)] = torch.randn(rank, inputs, generator=draw) * inputs**-0.5
            tensors[b_name(name)] = torch.randn(outputs, rank, generator=draw) * self._size
        return tensors
