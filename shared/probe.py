"""A probe: known logprobs of a version, by which an engine proves that it has loaded its weights."""

from __future__ import annotations

import msgspec


class ProbeSequence(msgspec.Struct, frozen=True):
    """One token sequence and its logprobs.

    token_ids: [T]; logprobs: [T-1], log p(token_ids[t+1] | token_ids[..t]) at temperature 1, natural logarithm.
    """

    token_ids: list[int]
    logprobs: list[float]


class Contrast(msgspec.Struct, frozen=True):
    """A token that a version and its parent score differently.

    token_ids: [T]; both logprobs are log p(token_ids[-1] | token_ids[:-1]) at temperature 1, natural logarithm.
    """

    token_ids: list[int]
    logprob: float
    parent_logprob: float


class Probe(msgspec.Struct, frozen=True):
    """The logprobs that an engine must reproduce after loading, before it serves this version."""

    dtype: str  # of the version's weights
    sequences: list[ProbeSequence]
    contrasts: list[Contrast] = []  # for full weights: the largest differences from the parent, above rounding
    base: list[ProbeSequence] = []  # for an adapter: the same sequences scored by the base model alone
    distinct: bool = True  # for an adapter: whether these logprobs differ from the base's by more than rounding
    arithmetic: str = "float32"  # the type in which these logprobs were computed

    @property
    def asked(self) -> list[list[int]]:
        """Token ids of everything that an engine scores: the sequences, then the contrasts."""
        return [one.token_ids for one in self.sequences] + [one.token_ids for one in self.contrasts]

    def rounding_of(self, engine: str) -> str:
        """Return the type whose rounding limits the accuracy of an engine that computes in the type `engine`."""
        return engine if self.arithmetic == "float32" else self.arithmetic
