"""Does an engine serve a version? It must compute the logprobs that the trainer wrote into the version's manifest."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from explorer_service.engines.admin import EngineAdmin
from explorer_service.errors import ProbeMismatch
from shared.config import Tolerance
from shared.errors import VersionError
from shared.experience import Sampling
from shared.probe import Probe

# Between trainer (float32) and engine, by the type of the weights in the engine.
TABLE = {
    "float32": Tolerance(per_token=2e-3, mean=5e-4),
    "float16": Tolerance(per_token=0.1, mean=0.02),
    "bfloat16": Tolerance(per_token=0.6, mean=0.1),
}


@dataclass(frozen=True, slots=True)
class Gap:
    """How far an engine's logprobs of a probe are from the trainer's."""

    largest: float  # of one logprob
    mean: float
    nearer: str = ""  # the other weights that it is nearer to, in words

    def is_within(self, allowed: Tolerance) -> bool:
        return self.largest <= allowed.per_token and self.mean <= allowed.mean


async def measure(admin: EngineAdmin, probe: Probe, model: str | None = None) -> Gap:
    """Score the probe's sequences, all at once. model: the name of an adapter.

    Where other weights were told apart from the version's, what the engine computes must be nearer to the version's:
    an adapter's base, and the parent of a version of all weights. Raises EngineError when the engine does not answer.
    """
    scores = await asyncio.gather(*(admin.score(token_ids, model) for token_ids in probe.asked))
    whole, last = scores[: len(probe.sequences)], [score[-1:] for score in scores[len(probe.sequences) :]]
    gap = _gap(admin, whole, [one.logprobs for one in probe.sequences])
    if probe.base and probe.distinct:
        base = _gap(admin, whole, [one.logprobs for one in probe.base])
        if gap.mean > base.mean:
            return replace(gap, nearer=f"the base model's, under the name {model}: the adapter has no effect there")
    if probe.contrasts:
        own = _gap(admin, last, [[one.logprob] for one in probe.contrasts])
        parent = _gap(admin, last, [[one.parent_logprob] for one in probe.contrasts])
        if own.mean > parent.mean:
            return replace(gap, nearer="those of the version's parent: the load had no effect there")
    return gap


async def prove(admin: EngineAdmin, probe: Probe, allowed: Tolerance, model: str | None = None) -> None:
    """Raise ProbeMismatch unless the engine computes the probe's logprobs; EngineError when it does not answer."""
    require(admin, await measure(admin, probe, model), allowed)


def require(admin: EngineAdmin, gap: Gap, allowed: Tolerance) -> None:
    """Raise ProbeMismatch for a gap that is too large, or when the engine is nearer to other weights."""
    if not gap.is_within(allowed):
        raise ProbeMismatch(
            f"engine {admin.url} computes other logprobs than the trainer: off by {gap.largest:.4g}, {gap.mean:.4g} on "
            f"average (allowed: {allowed.per_token:g} and {allowed.mean:g})"
        )
    if gap.nearer:
        raise ProbeMismatch(f"engine {admin.url} computes logprobs that are nearer to {gap.nearer}")


def _gap(admin: EngineAdmin, scores: list[list[float]], expected: list[list[float]]) -> Gap:
    """Raises ProbeMismatch for what is no number."""
    gaps = [
        abs(ours - trainers)
        for scored, told in zip(scores, expected, strict=True)
        for ours, trainers in zip(scored, told, strict=True)
    ]
    if not all(map(math.isfinite, gaps)):
        raise ProbeMismatch(f"engine {admin.url} computes logprobs that are no numbers")
    return Gap(max(gaps), sum(gaps) / len(gaps))


def read_sampling_defaults(folder: Path) -> Sampling:
    """What vLLM applies where a request sets nothing: generation_config.json of the version it serves.

    Raises VersionError.
    """
    file = folder / "generation_config.json"
    try:
        found = msgspec.json.decode(file.read_bytes(), type=_GenerationConfig)
    except FileNotFoundError:
        return Sampling()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise VersionError(f"{file} cannot be read ({exc})") from exc
    given = {name: value for name, value in msgspec.structs.asdict(found).items() if value is not None}
    return Sampling(**{**given, "top_k": max(0, found.top_k or 0)})


class _GenerationConfig(msgspec.Struct):
    """The fields that are vLLM's defaults, too (vllm/config/model.py, get_diff_sampling_param)."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
