"""Does an engine serve a version? It must compute the logprobs that the trainer wrote into the version's manifest."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from pathlib import Path

import msgspec

from explorer_service.engines.admin import EngineAdmin
from explorer_service.errors import ProbeMismatch
from shared.config import Tolerance
from shared.errors import VersionError
from shared.experience import Sampling
from shared.versions import Probe, ProbeSequence

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

    def is_within(self, allowed: Tolerance) -> bool:
        return self.largest <= allowed.per_token and self.mean <= allowed.mean


async def measure(admin: EngineAdmin, probe: Probe) -> Gap:
    """Score the probe's sequences, all at once. Raises EngineError when the engine does not."""
    return _gap(admin, await _score(admin, probe, None), probe.sequences)


async def prove(admin: EngineAdmin, probe: Probe, allowed: Tolerance, model: str | None = None) -> None:
    """Raise ProbeMismatch unless the engine computes the probe's logprobs; EngineError when it does not answer.

    model: the name of an adapter. Then what it computes must be nearer to the adapter's logprobs than to the base's,
    where those differ by more than an engine rounds.
    """
    scores = await _score(admin, probe, model)
    gap = _gap(admin, scores, probe.sequences)
    if not gap.is_within(allowed):
        raise mismatch(admin, gap, allowed)
    if probe.base and probe.distinct and gap.mean > (base := _gap(admin, scores, probe.base)).mean:
        raise ProbeMismatch(
            f"engine {admin.url} computes the base model's logprobs under the name {model} (off by {base.mean:.4g} on "
            f"average, and {gap.mean:.4g} from the adapter's); the adapter has no effect there"
        )


async def _score(admin: EngineAdmin, probe: Probe, model: str | None) -> list[list[float]]:
    return await asyncio.gather(*(admin.score(sequence.token_ids, model) for sequence in probe.sequences))


def _gap(admin: EngineAdmin, scores: list[list[float]], sequences: list[ProbeSequence]) -> Gap:
    """Raises ProbeMismatch for what is no number."""
    gaps = [
        abs(ours - trainers)
        for scored, sequence in zip(scores, sequences, strict=True)
        for ours, trainers in zip(scored, sequence.logprobs, strict=True)
    ]
    if not all(map(math.isfinite, gaps)):
        raise ProbeMismatch(f"engine {admin.url} computes logprobs that are no numbers")
    return Gap(max(gaps), sum(gaps) / len(gaps))


def mismatch(admin: EngineAdmin, gap: Gap, allowed: Tolerance) -> ProbeMismatch:
    """The error that tells how far an engine is from the trainer."""
    return ProbeMismatch(
        f"engine {admin.url} computes other logprobs than the trainer: off by {gap.largest:.4g}, {gap.mean:.4g} on "
        f"average (allowed: {allowed.per_token:g} and {allowed.mean:g})"
    )


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
