"""What a version holds of the policy: all its weights, or an adapter. One class for each `model.kind`.

The ranks agree on what is computed (`ask`), then each computes the same probe and reads the same weights; rank 0 alone
writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NotRequired, Protocol, TypedDict, Unpack

import torch
from torch import Tensor

from shared.adapters import ADAPTER_WEIGHTS, write_adapter_config
from shared.experience import JSON
from shared.probe import Contrast, Probe, ProbeSequence
from shared.tensors import Tensor as Described
from shared.versions import Manifest, read_manifest, version_path, write_version
from trainer_service.adapters import Adapters
from trainer_service.file_weights import FileWeights
from trainer_service.publish import (
    PROBE_SEQUENCES,
    compute_probe,
    probe_sequences,
    sample_sequences,
    weight_names,
    write_full_version,
)
from trainer_service.tensor_files import make_header, name_of, write_tensors

_CANDIDATES = 16  # sequences that the adapted model says, beside those that the base said
_KEPT = 4  # of all these: an engine scores them beside the streams that it writes
_CONTRASTS = 4  # tokens on which a version and its parent are told apart
_NOISE = 1e-3  # nats by which an engine's logprobs may differ from the trainer's through rounding alone
_NARROW_NOISE = 0.05  # the same where one of the two computes in 16 bits

Read = Callable[[str], Tensor]
Shrink = Callable[[Path, Manifest], Manifest]


class About(TypedDict):
    """What a version's writer says of it. shrink: as for `write_version`; without it none."""

    version: int
    parent: int
    step: int
    shrink: NotRequired[Shrink | None]


class VersionKind(Protocol):
    """How a policy becomes a version's folder."""

    def ask(self, root: Path) -> JSON:
        """What all ranks must know to take part: `names` of the weights that are read, and what the probe needs."""

    def remember(self) -> list[ProbeSequence]:
        """What the next version's probe compares with this one, computed by every rank."""

    def probe(self, asked: JSON, parent: list[ProbeSequence]) -> Probe:
        """The probe, computed by every rank. parent: what was remembered of the version before."""

    def reader(self, whole: Callable[[Tensor], Tensor]) -> Read:
        """Reads what a version's files hold, by its name there. whole: gives a parameter whole."""

    def write(self, root: Path, read: Read, probe: Probe, **about: Unpack[About]) -> Manifest:
        """Write the folder. Raises DiskFull and VersionError."""


def kind_of(policy: Any) -> VersionKind:
    """An adapter, where the model has one."""
    if Adapters(policy):
        return AdapterVersions(policy)
    return FullVersions(policy)


class FullVersions:
    """A version holds all weights."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy

    def ask(self, root: Path) -> JSON:
        dtype = read_manifest(root / version_path(0)).probe.dtype
        return {"names": weight_names(root), "sequences": probe_sequences(root), "dtype": dtype}

    def remember(self) -> list[ProbeSequence]:
        """What the policy says by itself: where it learns something, these are likely to change."""
        return compute_probe(self._policy, sample_sequences(self._policy))

    def probe(self, asked: JSON, parent: list[ProbeSequence]) -> Probe:
        now = compute_probe(self._policy, [sequence.token_ids for sequence in parent]) if parent else []
        arithmetic = _arithmetic(self._policy)
        noise = _noise(asked["dtype"], arithmetic)
        most = [_contrast(own, other) for own, other in zip(now, parent, strict=True)]
        told = [one for one in most if abs(one.logprob - one.parent_logprob) > noise]
        told.sort(key=lambda one: -abs(one.logprob - one.parent_logprob))
        own = compute_probe(self._policy, asked["sequences"])
        return Probe(asked["dtype"], own, told[:_CONTRASTS], arithmetic=arithmetic)

    def reader(self, whole: Callable[[Tensor], Tensor]) -> Read:
        return FileWeights(self._policy, whole)

    def write(self, root: Path, read: Read, probe: Probe, **about: Unpack[About]) -> Manifest:
        return write_full_version(root, read, probe, **about)


class AdapterVersions:
    """A version holds the policy's adapter, in the type of version 0's weights."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self._adapters = Adapters(policy)

    def ask(self, root: Path) -> JSON:
        dtype = read_manifest(root / version_path(0)).probe.dtype
        return {"names": list(self._adapters.weights()), "sequences": probe_sequences(root), "dtype": dtype}

    def remember(self) -> list[ProbeSequence]:
        """Nothing: an adapter is told apart from the base, and has a name of its own in the engine."""
        return []

    def probe(self, asked: JSON, parent: list[ProbeSequence]) -> Probe:
        """Of a few sequences, by base and adapter, those on which the two differ most."""
        with self._adapters.rounded(getattr(torch, asked["dtype"])):
            sequences = [*asked["sequences"], *sample_sequences(self._policy, _CANDIDATES)]
            blocks = [sequences[at : at + PROBE_SEQUENCES] for at in range(0, len(sequences), PROBE_SEQUENCES)]
            adapted = [one for block in blocks for one in compute_probe(self._policy, block)]
            with self._adapters.use(None):
                base = [one for block in blocks for one in compute_probe(self._policy, block)]
        gaps = [_gap(own, other) for own, other in zip(adapted, base, strict=True)]
        chosen = sorted(range(len(gaps)), key=lambda place: -gaps[place])[:_KEPT]
        arithmetic = _arithmetic(self._policy)
        return Probe(
            asked["dtype"],
            [adapted[place] for place in chosen],
            base=[base[place] for place in chosen],
            distinct=gaps[chosen[0]] > _noise(asked["dtype"], arithmetic),
            arithmetic=arithmetic,
        )

    def reader(self, whole: Callable[[Tensor], Tensor]) -> Read:
        weights = self._adapters.weights()
        return lambda name: whole(weights[name])

    def write(self, root: Path, read: Read, probe: Probe, **about: Unpack[About]) -> Manifest:
        assert about.get("shrink") is None, "an adapter is smaller than a delta"
        first = read_manifest(root / version_path(0))
        manifest = Manifest(
            *(about["version"], about["parent"], "lora", first.base, first.base_fingerprint),
            *(about["step"], time.time(), {}, probe),
            base_version=0,
        )
        dtype, shapes = name_of(getattr(torch, probe.dtype)), self._adapters.shapes()
        layout = {name: Described(dtype, shape) for name, shape in shapes.items()}

        def write_files(folder: Path) -> None:
            write_tensors(folder / ADAPTER_WEIGHTS, make_header(layout), layout, read)
            write_adapter_config(folder, self._adapters.describe(first.base_fingerprint))

        return write_version(root, manifest, write_files)


def _arithmetic(policy: Any) -> str:
    """The type that a policy computes in."""
    return str(next(policy.parameters()).dtype).removeprefix("torch.")


def _noise(dtype: str, arithmetic: str) -> float:
    """dtype: of the version's weights, and mostly the engine's. arithmetic: the trainer's."""
    return _NOISE if dtype == arithmetic == "float32" else _NARROW_NOISE


def _gap(own: ProbeSequence, other: ProbeSequence) -> float:
    return max(abs(a - b) for a, b in zip(own.logprobs, other.logprobs, strict=True))


def _contrast(own: ProbeSequence, other: ProbeSequence) -> Contrast:
    """The token of a sequence on which two versions differ most."""
    gaps = [abs(a - b) for a, b in zip(own.logprobs, other.logprobs, strict=True)]
    place = gaps.index(max(gaps))
    return Contrast(own.token_ids[: place + 2], own.logprobs[place], other.logprobs[place])
