"""How far an update moves the policy: measured on a sample of its batch, before the first step and after the last.

Numbers precomputed before a batch do not describe the weights after it, which are published. So a sample of at most
SAMPLE_TOKENS tokens is scored once more, and for the distance to the base a second one, if the base did not score the
first. With d the difference of two policies' logprobs of a token, ½ d² averaged over tokens estimates their KL
divergence (k2 of Schulman's note "Approximating KL Divergence"). It is never negative, and it grows when a policy
degenerates, whichever of the two sampled the tokens. But a single token that a confident policy did not expect may
dominate it. The change 1 − e^(−2|d|), which is one minus the square of the ratio of a token's smaller probability to
its larger one, lies between 0 and 1: no token outweighs the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from trainer_service.algorithms.seam import Batch, Figures, Floats
from trainer_service.precompute import Precompute
from trainer_service.ranks import Ranks

Doubles = npt.NDArray[np.float64]
SAMPLE_TOKENS = 4096  # of all ranks together; the first sequence may be longer


class Drift:
    """The samples of one update. Every rank chooses the same sequences, and computes its share of them."""

    def __init__(
        self, precompute: Precompute, ranks: Ranks, batch: Batch, precomputed: dict[str, list[Floats]]
    ) -> None:
        """precomputed: arrays of the whole batch, before the first step. Missing logprobs are computed here."""
        self._precompute, self._ranks, self._sequences = precompute, ranks, batch.sequences
        self._before, self._reference = precomputed["proximal"], precomputed["reference"]
        self._places = choose(batch)
        self._places_of_base = choose_for_base(batch, self._reference, self._places)
        self._all_places = list(dict.fromkeys([*self._places, *self._places_of_base]))
        if not all(len(self._before[place]) for place in self._places):
            # the same places as in `measure`, so that each rank computes the same sequences in both
            self._before, _ = precompute.score(self._sequences, self._all_places)

    def measure(self) -> Figures:
        """Return change_of_update, and in nats per token kl_of_update, entropy_after and, if the base was scored,
        kl_to_base.

        Equal on every rank; empty for an empty batch.
        """
        now, entropies = self._precompute.score(self._sequences, self._all_places)
        sample = self._places
        sums = {
            "change_of_update": _mean(_change, now, self._before, sample),
            "kl_of_update": _mean(_half_square, now, self._before, sample),
            "kl_to_base": _mean(_half_square, now, self._reference, self._places_of_base),
            "entropy_after": (sum(float(entropies[p].sum()) for p in sample), sum(len(now[p]) for p in sample)),
        }
        of_ranks = self._ranks.gather_json(sums)
        totals = {name: [sum(parts) for parts in zip(*(s[name] for s in of_ranks), strict=True)] for name in sums}
        return {name: total / tokens for name, (total, tokens) in totals.items() if tokens}


def choose(batch: Batch) -> list[int]:
    """Return places of the first sampled sequences, or else of written ones, up to SAMPLE_TOKENS tokens."""
    sampled = [place for places in batch.members for place in places]
    return _first(batch, sampled or batch.written)


def choose_for_base(batch: Batch, reference: Sequence[Floats], sample: list[int]) -> list[int]:
    """Return the sample if the base scored all of it, or else the first other sequences that it scored.

    Ratings and preferences are about single replies. If a reply's turn was merged, it is a sequence of its own, which
    is not in the sample. Sequences of one prompt and another's reply, which kto only scores, are left out.
    """
    if all(len(reference[place]) for place in sample):
        return sample
    said = {place for places in (*batch.members, *batch.pairs, batch.ratings) for place in places}
    scored = [place for place in sorted(said) if len(reference[place])]
    return _first(batch, [place for place in scored if place not in batch.written] or scored)


def _first(batch: Batch, places: Sequence[int]) -> list[int]:
    """Return the first of these places, up to SAMPLE_TOKENS tokens."""
    chosen: list[int] = []
    tokens = 0
    for place in places:
        tokens += len(batch.sequences[place].token_ids)
        if chosen and tokens > SAMPLE_TOKENS:
            break
        chosen.append(place)
    return chosen


def _half_square(d: Doubles) -> Doubles:
    return 0.5 * d**2


def _change(d: Doubles) -> Doubles:
    change: Doubles = -np.expm1(-2 * np.abs(d))
    return change


def _mean(
    of: Callable[[Doubles], Doubles], now: Sequence[Floats], then: Sequence[Floats], places: Sequence[int]
) -> tuple[float, int]:
    """Return Σ of(d) over the actions of these sequences, and their number; unknown logprobs are skipped."""
    known = [place for place in places if len(now[place]) and len(then[place])]
    total = sum(float(of(np.subtract(now[place], then[place], dtype=np.float64)).sum()) for place in known)
    return total, sum(len(now[place]) for place in known)
