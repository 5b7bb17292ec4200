"""Prove that an engine serves a version: it must compute the logprobs in the version's manifest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from explorer_service.engines.admin import EngineAdmin
from explorer_service.errors import NO_JSON, EngineRefused, ProbeMismatch
from shared.config import Tolerance
from shared.errors import VersionError, VersionMissing
from shared.experience import Sampling
from shared.probe import Probe
from shared.versions import MANIFEST

# Between trainer and engine, by the engine's type or, if that is float32, the trainer's.
TABLE = {
    "float32": Tolerance(per_token=2e-3, mean=5e-4),
    "float16": Tolerance(per_token=0.1, mean=0.02),
    "bfloat16": Tolerance(per_token=0.6, mean=0.1),
}


_Logprobs = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Gap:
    """The differences between an engine's and the trainer's logprobs of a probe."""

    largest: float
    mean: float
    nearer: str = ""  # other weights that the engine is nearer to, in words

    def is_within(self, allowed: Tolerance) -> bool:
        return self.largest <= allowed.per_token and self.mean <= allowed.mean


@dataclass(frozen=True, slots=True)
class Bounds:
    """The allowed differences between an engine and the trainer."""

    allowed: Tolerance
    rounding: Gap  # of the engine; it cannot distinguish versions that differ by less than twice as much


async def measure(admin: EngineAdmin, probe: Probe, rounding: Gap, model: str | None = None) -> Gap:
    """Score the probe's sequences, all in one request, and return the gap. model: the name of an adapter.

    Its `nearer` is set if the engine is nearer to an adapter's base, or to a full version's parent, than to the
    version, and these differ by more than the engine rounds. Raises EngineError if the engine does not answer,
    EngineRefused if it does not know the model, ProbeMismatch for logprobs that are not finite.
    """
    try:
        scores = await admin.score(probe.asked, model)
    except EngineRefused as error:  # vLLM has no answer for logprobs that are no numbers, or tokens it does not know
        await admin.check_health()  # the process that answers may outlive the one that computes
        if error.status == 404:
            raise
        raise ProbeMismatch(f"the probe is refused: {error}") from error
    if not all(math.isfinite(logprob) for score in scores for logprob in score):
        raise ProbeMismatch(f"engine {admin.url} computes logprobs that are not finite")
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
    """Whether the scores are nearer to another model's than to the version's, and the two can be distinguished.

    An engine that is off by at most `rounding` is nearer to the weights that it holds if the two differ by twice that.
    """
    return _gap(other, own).mean > 2 * rounding and _gap(scores, own).mean > _gap(scores, other).mean


async def prove(admin: EngineAdmin, probe: Probe, bounds: Bounds, model: str | None = None) -> None:
    """Raise ProbeMismatch unless the engine computes the probe's logprobs; EngineError if it does not answer."""
    require(admin, await measure(admin, probe, bounds.rounding, model), bounds.allowed)


def require(admin: EngineAdmin, gap: Gap, allowed: Tolerance) -> None:
    """Raise ProbeMismatch if the gap is too large, or the engine is nearer to other weights."""
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
    """Read vLLM's defaults for fields that a request does not set, from the served version's generation_config.json.

    Raises VersionError; VersionMissing while the version's folder is not there or cannot be read.
    """
    file = folder / "generation_config.json"
    try:
        found = _decode_generation_config(file.read_bytes())
    except FileNotFoundError as exc:
        if not (folder / MANIFEST).exists():
            raise VersionMissing(f"{folder} is not there; is root_dir mounted?") from exc
        return Sampling()
    except OSError as exc:  # may be temporary, or on this machine only
        raise VersionMissing(f"{file} cannot be read ({exc.strerror})") from exc
    except NO_JSON as exc:
        raise VersionError(f"{file} cannot be read ({exc})") from exc
    given = {name: value for name, value in msgspec.structs.asdict(found).items() if value is not None}
    return Sampling(**{**given, "top_k": max(0, found.top_k or 0)})


def read_defaults_before(model: str) -> Sampling:
    """Read vLLM's defaults before any version was published: those in the folder of model.path, if it is here.

    Raises VersionError.
    """
    try:
        return read_sampling_defaults(Path(model))
    except VersionMissing:
        return Sampling()


class _GenerationConfig(msgspec.Struct):
    """The fields that vLLM uses as defaults (vllm/config/model.py, get_diff_sampling_param)."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


_decode_generation_config = msgspec.json.Decoder(_GenerationConfig).decode
