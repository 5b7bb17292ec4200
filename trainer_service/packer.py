"""Packs the sequences that one rank computes, and adds passes so that all ranks make equally many.

Under ZeRO 3 every forward pass is a collective; under all stages every step is one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer_service.packing import MicroBatch, Rows, pack
from trainer_service.ranks import Ranks
from trainer_service.trajectories import TokenSequence


class Packer:
    """Packs sequences for one rank."""

    def __init__(self, ranks: Ranks, device: torch.device, max_tokens: int, rows: Rows) -> None:
        """max_tokens: of one forward pass. rows: row layout that all models support."""
        self._ranks, self._device, self._max_tokens, self._rows = ranks, device, max_tokens, rows

    def share(self, sequences: Sequence[TokenSequence], places: Sequence[int]) -> list[int]:
        """Return the places of the sequences that this rank computes."""
        return [places[number] for number in self._ranks.share([len(sequences[p].token_ids) for p in places])]

    def pack(
        self, sequences: Sequence[TokenSequence], places: Sequence[int], units: Sequence[Sequence[int]] = ()
    ) -> list[MicroBatch]:
        """Pack the named sequences on this rank's device. units: sequences that must share a micro-batch."""
        if not places:
            return []
        return [micro.to(self._device) for micro in pack(sequences, places, self._max_tokens, self._rows, units)]

    def fill(self, sequences: Sequence[TokenSequence], count: int) -> list[MicroBatch]:
        """Return micro-batches to add to `count`, so that every rank has as many. Their results have no effect."""
        missing = self._ranks.largest(count) - count
        if not missing:
            return []
        shortest = min(range(len(sequences)), key=lambda place: len(sequences[place].token_ids))
        return self.pack(sequences, [shortest]) * missing
