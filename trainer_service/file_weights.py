"""A model's weights as its files hold them. Transformers joins some of them when it loads a folder, and parts them when
it saves one: the experts of a mixture, for one, are a single tensor in memory and many in a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from trainer_service.models import named_weights

_HELD = 4  # joined tensors that are in memory at once: files order the pieces of one layer's experts by expert


class FileWeights:
    """Reads a model's weights by their names in its files, one at a time."""

    def __init__(self, model: Any, whole: Callable[[Tensor], Tensor]) -> None:
        """whole: gives a parameter whole. Ranks that share it must ask for the same weights in the same order."""
        self._model, self._whole = model, whole
        self._named = named_weights(model)
        self._pieces: dict[str, dict[str, Tensor]] = {}  # of the joined tensors that were read last
        self._joined: dict[str, str] = {}  # a name in a file → the name in the model
        for name, tensor in self._named.items():
            shape = getattr(tensor, "ds_shape", tensor.shape)
            self._joined |= dict.fromkeys(self._part(name, torch.empty(shape, device="meta")), name)

    def __call__(self, name: str) -> Tensor:
        """Whole and as the optimizer holds it, in float32. Raises KeyError for a name that no file of the model has."""
        joined = self._joined[name]
        pieces = self._pieces.pop(joined, None)
        if pieces is None:
            pieces = self._part(joined, self._whole(self._named[joined]))
        if len(pieces) > 1:
            self._pieces[joined] = pieces  # at the end: read last
            for oldest in list(self._pieces)[:-_HELD]:
                del self._pieces[oldest]
        return pieces[name]

    def _part(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """By their names in a file."""
        parted: dict[str, Tensor] = revert_weight_conversion(self._model, {name: tensor})
        return parted
