"""What an engine computes is the version's, and not its parent's where the two were told apart."""

from __future__ import annotations

import pytest

from explorer_service.errors import ProbeMismatch
from explorer_service.reload.probe import TABLE, Bounds, Gap, measure, prove
from shared.probe import Contrast, Probe, ProbeSequence

ALIKE = ProbeSequence([5, 6, 7], [-1.0, -2.0])  # by the version; its parent says nearly the same
PROBE = Probe("bfloat16", [ALIKE], [Contrast([5, 8], -1.0, -1.3), Contrast([5, 6, 9], -2.0, -1.7)])
BOUNDS = Bounds(TABLE["bfloat16"], Gap(0.04, 0.02))


class Engine:
    """Computes so much of the way from the parent's logprobs to the version's, and rounds."""

    url = "http://engine"

    def __init__(self, share: float, noise: float = 0.02) -> None:
        self._share, self._noise = share, noise

    async def score(self, sequences: list[list[int]], model: str | None) -> list[list[float]]:
        return [self._score(token_ids) for token_ids in sequences]

    def _score(self, token_ids: list[int]) -> list[float]:
        for one in PROBE.contrasts:
            if one.token_ids == token_ids:
                last = self._share * one.logprob + (1 - self._share) * one.parent_logprob
                return [*([-3.0] * (len(token_ids) - 2)), last + self._noise]
        return [logprob + self._noise for logprob in ALIKE.logprobs]


async def test_an_engine_that_computes_the_version_passes_though_it_rounds():
    await prove(Engine(1.0), PROBE, BOUNDS)
    await prove(Engine(1.0, noise=-0.02), PROBE, BOUNDS)


@pytest.mark.parametrize("noise", [0.02, -0.02])
async def test_an_engine_that_still_computes_the_parent_does_not_pass_though_it_is_within_what_rounding_allows(noise):
    engine = Engine(0.0, noise)
    assert (await measure(engine, PROBE, BOUNDS.rounding)).is_within(BOUNDS.allowed)
    with pytest.raises(ProbeMismatch, match="nearer to those of the version's parent: the load had no effect there"):
        await prove(engine, PROBE, BOUNDS)


async def test_a_version_without_contrasts_is_proven_by_its_sequences_alone():
    await prove(Engine(0.0), Probe("bfloat16", [ALIKE]), BOUNDS)


async def test_on_an_engine_that_rounds_as_much_as_versions_differ_nothing_is_concluded_from_it():
    """Such as one in 8 bits: it would be nearer to either by chance."""
    rough = Bounds(TABLE["bfloat16"], Gap(0.16, 0.05))
    await prove(Engine(0.4), PROBE, rough)
    with pytest.raises(ProbeMismatch, match="nearer"):
        await prove(Engine(0.4), PROBE, BOUNDS)


async def test_an_adapter_that_differs_from_its_base_by_less_than_the_engine_rounds_is_not_taken_for_it():
    base = ProbeSequence(ALIKE.token_ids, [-1.02, -2.02])
    probe = Probe("float32", [ALIKE], base=[base])
    engine = Engine(1.0, noise=-0.015)
    await prove(engine, probe, BOUNDS, "agent@1")
    with pytest.raises(ProbeMismatch, match="nearer to the base model's, under the name agent@1"):
        await prove(engine, probe, Bounds(TABLE["bfloat16"], Gap(0.005, 0.005)), "agent@1")
