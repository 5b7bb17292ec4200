"""What one rank computes: its share of sequences, packed, and filled up so that all ranks make as many passes.

Under ZeRO 3 every forward pass is a collective, under all stages every step is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer_service.packing import MicroBatch, Rows, pack
from trainer_service.ranks import Ranks
from trainer_service.trajectories import TokenSequence


class Packer:
    """Packs for one rank."""

    def __init__(self, ranks: Ranks, device: torch.device, max_tokens: int, rows: Rows) -> None:
        """max_tokens: of one forward pass. rows: what the models can compute at once."""
        self._ranks, self._device, self._max_tokens, self._rows = ranks, device, max_tokens, rows

    def share(self, sequences: Sequence[TokenSequence], places: Sequence[int]) -> list[int]:
        """Those of the sequences that this rank computes."""
        return [places[number] for number in self._ranks.share([len(sequences[p].token_ids) for p in places])]

    def pack(
        self, sequences: Sequence[TokenSequence], places: Sequence[int], units: Sequence[Sequence[int]] = ()
    ) -> list[MicroBatch]:
        """The named sequences on this rank's device. units: those that must share a micro-batch."""
        if not places:
            return []
        return [micro.to(self._device) for micro in pack(sequences, places, self._max_tokens, self._rows, units)]

    def fill(self, sequences: Sequence[TokenSequence], count: int) -> list[MicroBatch]:
        """What a rank with `count` micro-batches computes besides, to no effect, until the one with most is done."""
        missing = self._ranks.largest(count) - count
        if not missing:
            return []
        shortest = min(range(len(sequences)), key=lambda place: len(sequences[place].token_ids))
        return self.pack(sequences, [shortest]) * missing
