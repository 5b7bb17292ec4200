"""A model's weights as its files store them. Transformers joins some of them when it loads a folder, and splits them
when it saves one: the experts of a mixture, for example, are a single tensor in memory and many in a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from trainer_service.models import named_weights

_HELD = 4  # joined tensors in memory at once: files sort the pieces of one layer's experts by expert


class FileWeights:
    """Reads a model's weights by their names in its files, one at a time."""

    def __init__(self, model: Any, whole: Callable[[Tensor], Tensor]) -> None:
        """whole: gathers a parameter. Ranks that share it must request the same weights in the same order."""
        self._model, self._whole = model, whole
        self._named = named_weights(model)
        self._pieces: dict[str, dict[str, Tensor]] = {}  # pieces of the joined tensors that were read last
        self._joined: dict[str, str] = {}  # name in a file → name in the model
        for name, tensor in self._named.items():
            shape = getattr(tensor, "ds_shape", tensor.shape)
            self._joined |= dict.fromkeys(self._part(name, torch.empty(shape, device="meta")), name)

    def __call__(self, name: str) -> Tensor:
        """Return a whole weight in the optimizer's float32. Raises KeyError for a name that no file contains."""
        joined = self._joined[name]
        pieces = self._pieces.pop(joined, None)
        if pieces is None:
            pieces = self._part(joined, self._whole(self._named[joined]))
        if len(pieces) > 1:
            self._pieces[joined] = pieces  # last in the order: the most recently read
            for oldest in list(self._pieces)[:-_HELD]:
                del self._pieces[oldest]
        return pieces[name]

    def _part(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a weight by their names in a file."""
        parted: dict[str, Tensor] = revert_weight_conversion(self._model, {name: tensor})
        return parted
