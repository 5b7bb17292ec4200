"""Numbers that losses treat as constant: one forward pass of each model that an algorithm needs, over its sequences.

It runs before the first step of a batch, without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from trainer_service.algorithms.seam import Algorithm, Batch, Floats, Needs, Precomputed, Unit, Words
from trainer_service.backends.deepspeed import DeepSpeedBackend
from trainer_service.logprobs import Scores
from trainer_service.packer import Packer
from trainer_service.packing import MicroBatch, scatter
from trainer_service.trajectories import TokenSequence

Reference = Callable[[MicroBatch], Scores]

_NOTHING = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class Arrays:
    """Scores by the models, as fields of `Precomputed` by name."""

    common: dict[str, list[Any]]  # the same for all parts
    of_part: dict[str, dict[str, list[Any]]]  # by part: the scores by its teacher

    def seen_by(self, part: str) -> Precomputed:
        """Return what a part gets to see."""
        return Precomputed(**self.common, **self.of_part.get(part, {}))


class Precompute:
    """Runs the models and collects these numbers."""

    def __init__(
        self,
        backend: DeepSpeedBackend,
        reference: Reference | None,
        packer: Packer,
        teachers: Mapping[str, Reference] | None = None,
    ) -> None:
        """reference: scores by the base model; None: not needed. teachers: scores by other models, by part."""
        self._backend = backend
        self._reference = reference
        self._teachers = teachers or {}
        self._packer = packer

    @torch.no_grad()
    def run(self, batch: Batch, parts: Mapping[str, tuple[Algorithm, list[Unit]]]) -> Arrays:
        """Return scores by the models: those of `common` are computed once for all parts.

        Each rank computes its share of the sequences, and leaves the other arrays empty.
        """
        self._backend.module.eval()
        names = ("proximal", "processed", "reference", "values")
        seen: dict[str, list[Floats]] = {name: [_NOTHING] * len(batch.sequences) for name in names}
        for_proximal, for_values = (_wanted(parts, need) for need in (Needs.PROXIMAL, Needs.VALUES))
        for micro in self._pack(batch.sequences, sorted(for_proximal | for_values)):
            scores: Scores = self._backend(micro, processed=bool(for_proximal), values=bool(for_values))
            scatter(scores["logprobs"], micro, seen["proximal"])
            if for_proximal:
                scatter(scores["processed"], micro, seen["processed"])
            if for_values:
                scatter(scores["values"], micro, seen["values"])
        for micro in self._pack(batch.sequences, sorted(_wanted(parts, Needs.REFERENCE))):
            assert self._reference is not None
            scatter(self._reference(micro)["logprobs"], micro, seen["reference"])
        taught = {
            name: self._teach(batch, name, units, getattr(algorithm, "top", 0))
            for name, (algorithm, units) in parts.items()
            if Needs.TEACHER in algorithm.needs
        }
        return Arrays(seen, taught)

    @torch.no_grad()
    def score(self, sequences: Sequence[TokenSequence], places: Sequence[int]) -> tuple[list[Floats], list[Floats]]:
        """Return log π and entropy of each action under the current weights; empty for sequences of other ranks."""
        self._backend.module.eval()
        logprobs, entropies = [_NOTHING] * len(sequences), [_NOTHING] * len(sequences)
        own = set(self._packer.share(sequences, places))
        for micro in self._pack(sequences, places):
            scores: Scores = self._backend(micro, entropies=True, values=False)
            if own.issuperset(micro.members):  # else it only pads the number of passes
                scatter(scores["logprobs"], micro, logprobs)
                scatter(scores["entropy"], micro, entropies)
        return logprobs, entropies

    def _teach(self, batch: Batch, name: str, units: list[Unit], top: int) -> dict[str, list[Any]]:
        """Return a teacher's log p of each member's actions; if a member has words, after them and where they apply.

        The teacher is the part's own, or else the policy at the start of the batch. top: number of most likely tokens.
        """
        asked = [
            behind(words, batch.sequences[place]) if words else batch.sequences[place]
            for unit in units
            for place, words in zip(unit.members, unit.words or (None,) * len(unit.members), strict=True)
        ]
        kinds = ("teacher", "top", "top_logprobs") if top else ("teacher",)
        scored: dict[str, list[Any]] = {kind: [_NOTHING] * len(asked) for kind in kinds}
        teacher: Callable[..., Scores] = self._teachers.get(name) or self._backend
        for micro in self._pack(asked, range(len(asked))):
            scores = teacher(micro, top=top) if top else teacher(micro)
            found = (scores["logprobs"], *scores["top"]) if top else (scores["logprobs"],)
            for kind, values in zip(scored, found, strict=True):
                scatter(values, micro, scored[kind])
        return scored

    def _pack(self, sequences: Sequence[TokenSequence], places: Sequence[int]) -> list[MicroBatch]:
        """Pack this rank's share. Sequences that pad the number of passes are computed again, with the same result."""
        own = self._packer.share(sequences, places)
        micros = self._packer.pack(sequences, own)
        return [*micros, *self._packer.fill(sequences, len(micros))]


def _wanted(parts: Mapping[str, tuple[Algorithm, list[Unit]]], need: Needs) -> set[int]:
    """Return the sequences that algorithms with this need learn from."""
    return {
        place
        for algorithm, units in parts.values()
        if need in algorithm.needs
        for unit in units
        for place in unit.members
    }


def behind(words: Words, sequence: TokenSequence) -> TokenSequence:
    """Return a sequence with words before its tokens; its actions are those that the words are about."""
    length, chosen = len(words.token_ids), words.actions
    end = int(sequence.actions[chosen[-1]]) + 1
    by_action = ("behaviour", "rewards", "versions", "crossed", "sampling", "masked")
    return replace(
        sequence,
        token_ids=np.concatenate([words.token_ids, sequence.token_ids[:end]]),
        actions=length + sequence.actions[chosen],
        starts=length + sequence.starts[chosen],
        ends=[len(chosen) - 1],
        **{name: getattr(sequence, name)[chosen] for name in by_action},
    )
