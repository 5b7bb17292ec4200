"""Earlier weights of the policy: a teacher of `hint` that changes more slowly than the policy that it teaches.

Every rank stores a second copy of the trained weights, whole and in float32: their running average over updates, or
those of the version that was written last. For a forward pass they replace the policy's own weights, so that there is
no second model. An average is part of the trainer's state; a version's weights are in the state itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shared.config import HintConfig
from shared.log import StageLogger
from trainer_service.backends.deepspeed import DeepSpeedBackend
from trainer_service.disk import as_os_error
from trainer_service.logprobs import Scores
from trainer_service.packing import MicroBatch

log = StageLogger("teacher")
AVERAGE = "average.safetensors"


class PastPolicy:
    """Earlier weights of the policy."""

    def __init__(self, backend: DeepSpeedBackend, own: Sequence[nn.Parameter], config: HintConfig) -> None:
        """own: the policy's trained parameters; not sharded, as ZeRO 3's are."""
        mine = {id(parameter) for parameter in own}
        self._trained = {name: p for name, p in backend.trained_parameters().items() if id(p) in mine}
        assert not any(hasattr(parameter, "ds_id") for parameter in self._trained.values())
        self._backend = backend
        self._decay = config.teacher_decay if config.teacher == "average" else None
        self.weights: dict[str, Tensor] = {}
        self.renew()

    def renew(self) -> None:
        """Copy the policy's current weights."""
        self.weights = {name: self._backend.whole(p).float().clone() for name, p in self._trained.items()}

    def written(self) -> None:
        """Called after the policy was written as a version."""
        if self._decay is None:
            self.renew()

    @torch.no_grad()
    def updated(self) -> None:
        """Called after an update: x ← d x + (1 − d) w."""
        if self._decay is not None:
            for name, parameter in self._trained.items():
                self.weights[name].lerp_(self._backend.whole(parameter).float(), 1 - self._decay)

    def scores(self, micro: MicroBatch, **wanted: Any) -> Scores:
        """Scores by these weights. wanted: see `head.Question`."""
        with self._in_place():
            scores: Scores = self._backend(micro, values=False, **wanted)
        return scores

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        own = {name: parameter.data for name, parameter in self._trained.items()}
        try:
            for name, parameter in self._trained.items():
                parameter.data = self.weights[name].to(parameter.dtype)
            yield
        finally:
            for name, parameter in self._trained.items():
                parameter.data = own[name]

    def save(self, folder: Path) -> None:
        """Write the average into a state's folder, on rank 0. Raises OSError."""
        if self._decay is not None:
            try:
                save_file({name: tensor.cpu().contiguous() for name, tensor in self.weights.items()}, folder / AVERAGE)
            except SafetensorError as exc:
                raise as_os_error(exc) from None

    def load(self, folder: Path | None) -> None:
        """Load what `save` wrote, on every rank, after the policy was loaded. folder: None on every rank but 0.

        A state saved with another teacher has no average: the average then starts from the policy's weights.
        """
        self.renew()
        ranks = self._backend.ranks
        found = load_file(folder / AVERAGE) if folder is not None and (folder / AVERAGE).exists() else {}
        shapes = {name: list(tensor.shape) for name, tensor in found.items()}
        known = {name: list(tensor.shape) for name, tensor in self.weights.items()}
        if self._decay is None or ranks.broadcast_json(shapes) != known:
            if self._decay is not None:
                log.info("the state holds no average of this policy; it starts from the policy's weights")
            return
        for name, tensor in self.weights.items():
            tensor.copy_(ranks.broadcast(found.get(name, torch.empty_like(tensor)), self._backend.device))
