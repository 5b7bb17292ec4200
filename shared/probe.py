"""What a version computes on given tokens: how an engine shows that it has loaded its weights."""

from __future__ import annotations

import msgspec


class ProbeSequence(msgspec.Struct, frozen=True):
    """One token sequence and its logprobs.

    token_ids: [T]; logprobs: [T-1], log p(token_ids[t+1] | token_ids[..t]) at temperature 1, natural logarithm.
    """

    token_ids: list[int]
    logprobs: list[float]


class Contrast(msgspec.Struct, frozen=True):
    """A token on which a version and its parent differ.

    token_ids: [T]; both logprobs are log p(token_ids[-1] | token_ids[:-1]) at temperature 1, natural logarithm.
    """

    token_ids: list[int]
    logprob: float
    parent_logprob: float


class Probe(msgspec.Struct, frozen=True):
    """The logprobs that an engine must reproduce after loading, before it serves under this version's name."""

    dtype: str  # the type of the version's weights
    sequences: list[ProbeSequence]
    contrasts: list[Contrast] = []  # of all weights: where they differ most from the parent's, by more than rounding
    base: list[ProbeSequence] = []  # of an adapter: the same sequences by the base model alone
    distinct: bool = True  # of an adapter: whether these logprobs differ from the base's by more than an engine rounds
    arithmetic: str = "float32"  # the type that these logprobs were computed in

    @property
    def asked(self) -> list[list[int]]:
        """Token ids of all that an engine scores: the sequences, then the contrasts."""
        return [one.token_ids for one in self.sequences] + [one.token_ids for one in self.contrasts]

    def rounding_of(self, engine: str) -> str:
        """The type whose rounding decides how far an engine that computes in the type `engine` may be from these."""
        return engine if self.arithmetic == "float32" else self.arithmetic
