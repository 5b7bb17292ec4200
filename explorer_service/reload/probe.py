"""Does an engine serve a version? It must compute the logprobs that the trainer wrote into the version's manifest."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from explorer_service.engines.admin import EngineAdmin
from explorer_service.errors import NO_JSON, ProbeMismatch
from shared.config import Tolerance
from shared.errors import VersionError, VersionMissing
from shared.experience import Sampling
from shared.probe import Probe
from shared.versions import MANIFEST

# Between trainer and engine, by the type that decides: the engine's, or where that is float32 the trainer's.
TABLE = {
    "float32": Tolerance(per_token=2e-3, mean=5e-4),
    "float16": Tolerance(per_token=0.1, mean=0.02),
    "bfloat16": Tolerance(per_token=0.6, mean=0.1),
}


_Logprobs = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Gap:
    """How far an engine's logprobs of a probe are from the trainer's."""

    largest: float  # of one logprob
    mean: float
    nearer: str = ""  # the other weights that it is nearer to, in words

    def is_within(self, allowed: Tolerance) -> bool:
        return self.largest <= allowed.per_token and self.mean <= allowed.mean


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far an engine may be from the trainer."""

    allowed: Tolerance
    rounding: Gap  # what its rounding may make; versions that are less than twice that apart cannot be told apart on it


async def measure(admin: EngineAdmin, probe: Probe, rounding: Gap, model: str | None = None) -> Gap:
    """Score the probe's sequences, all at once. model: the name of an adapter.

    Where other weights are told apart from the version's by more than the engine rounds, what it computes must be
    nearer to the version's: an adapter's base, and the parent of a version of all weights. Raises EngineError when the
    engine does not answer, ProbeMismatch for what is no number.
    """
    scores = await asyncio.gather(*(admin.score(token_ids, model) for token_ids in probe.asked))
    if not all(math.isfinite(logprob) for score in scores for logprob in score):
        raise ProbeMismatch(f"engine {admin.url} computes logprobs that are no numbers")
    whole, last = scores[: len(probe.sequences)], [score[-1:] for score in scores[len(probe.sequences) :]]
    expected = [one.logprobs for one in probe.sequences]
    gap = _gap(whole, expected)
    if (
        probe.base
        and probe.distinct
        and _is_nearer([one.logprobs for one in probe.base], whole, expected, rounding.mean)
    ):
        return replace(gap, nearer=f"the base model's, under the name {model}: the adapter has no effect there")
    own, parent = ([[one.logprob] for one in probe.contrasts], [[one.parent_logprob] for one in probe.contrasts])
    if probe.contrasts and _is_nearer(parent, last, own, rounding.largest):
        return replace(gap, nearer="those of the version's parent: the load had no effect there")
    return gap


def _is_nearer(other: _Logprobs, scores: _Logprobs, own: _Logprobs, rounding: float) -> bool:
    """Whether the scores are nearer to another model's than to the version's, and the two too far apart to be mistaken.

    An engine that is off by at most `rounding` is nearer to what it holds when the two are twice that apart.
    """
    return _gap(other, own).mean > 2 * rounding and _gap(scores, own).mean > _gap(scores, other).mean


async def prove(admin: EngineAdmin, probe: Probe, bounds: Bounds, model: str | None = None) -> None:
    """Raise ProbeMismatch unless the engine computes the probe's logprobs; EngineError when it does not answer."""
    require(admin, await measure(admin, probe, bounds.rounding, model), bounds.allowed)


def require(admin: EngineAdmin, gap: Gap, allowed: Tolerance) -> None:
    """Raise ProbeMismatch for a gap that is too large, or when the engine is nearer to other weights."""
    if not gap.is_within(allowed):
        raise ProbeMismatch(
            f"engine {admin.url} computes other logprobs than the trainer: off by {gap.largest:.4g}, {gap.mean:.4g} on "
            f"average (allowed: {allowed.per_token:g} and {allowed.mean:g})"
        )
    if gap.nearer:
        raise ProbeMismatch(f"engine {admin.url} computes logprobs that are nearer to {gap.nearer}")


def _gap(scores: _Logprobs, expected: _Logprobs) -> Gap:
    gaps = [
        abs(ours - theirs)
        for scored, told in zip(scores, expected, strict=True)
        for ours, theirs in zip(scored, told, strict=True)
    ]
    return Gap(max(gaps), sum(gaps) / len(gaps))


def read_sampling_defaults(folder: Path) -> Sampling:
    """What vLLM applies where a request sets nothing: generation_config.json of the version it serves.

    Raises VersionError, VersionMissing while the version's folder is not there or cannot be read.
    """
    file = folder / "generation_config.json"
    try:
        found = msgspec.json.decode(file.read_bytes(), type=_GenerationConfig)
    except FileNotFoundError as exc:
        if not (folder / MANIFEST).exists():
            raise VersionMissing(f"{folder} is not there; is root_dir mounted?") from exc
        return Sampling()
    except OSError as exc:  # here and now: that says nothing of the version
        raise VersionMissing(f"{file} cannot be read ({exc.strerror})") from exc
    except NO_JSON as exc:
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
