"""How a version stores the policy: all weights, or an adapter. One class for each `model.kind`.

The ranks agree on what is computed (`ask`); then each computes the same probe and reads the same weights. Only rank 0
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
from shared.tensors import make_header
from shared.versions import Manifest, read_manifest, version_path, write_version
from trainer_service.adapters import Adapters
from trainer_service.file_weights import FileWeights
from trainer_service.publish import (
    PROBE_SEQUENCES,
    compute_probe,
    probe_sequences,
    pytorch_name,
    sample_sequences,
    weight_names,
    write_full_version,
)
from trainer_service.tensor_files import PYTORCH, name_of, write_tensors

_CANDIDATES = 16  # sequences sampled from the adapted model, besides those of the base model
_KEPT = 4  # of all these: an engine scores them while it serves streams
_COMPARED = (24, 8)  # sequences and their length, sampled from each parent: many short ones take few forward passes
_CONTRASTS = 4  # tokens that distinguish a version from its parent
_NOISE = 1e-3  # nats by which rounding alone may change an engine's logprobs against the trainer's
_NARROW_NOISE = 0.05  # the same if one of the two computes in 16 bits

Read = Callable[[str], Tensor]
Shrink = Callable[[Path, Manifest], Manifest]


class About(TypedDict):
    """Fields of a version's manifest. shrink: see `write_version`; optional."""

    version: int
    parent: int
    step: int
    shrink: NotRequired[Shrink | None]


class VersionKind(Protocol):
    """Converts a policy to a version's folder."""

    def ask(self, root: Path) -> JSON:
        """Return what all ranks need to take part: `names` of the weights to read, and the inputs of the probe."""

    def remember(self) -> list[ProbeSequence]:
        """Return what the next version's probe is compared with, computed by every rank."""

    def probe(self, asked: JSON, parent: list[ProbeSequence]) -> Probe:
        """Return the probe, computed by every rank. parent: what `remember` returned for the version before."""

    def reader(self, whole: Callable[[Tensor], Tensor]) -> Read:
        """Return a function that reads a tensor by its name in a version's files. whole: gathers a parameter."""

    def write(self, root: Path, read: Read, probe: Probe, **about: Unpack[About]) -> Manifest:
        """Write the folder. Raises DiskFull and VersionError."""


def kind_of(policy: Any) -> VersionKind:
    """Return the adapter's kind if the model has adapters."""
    if Adapters(policy):
        return AdapterVersions(policy)
    return FullVersions(policy)


class FullVersions:
    """A version contains all weights."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy

    def ask(self, root: Path) -> JSON:
        dtype = read_manifest(root / version_path(0)).probe.dtype
        return {"names": weight_names(root), "sequences": probe_sequences(root), "dtype": dtype}

    def remember(self) -> list[ProbeSequence]:
        """Sample from the policy itself: such sequences are likely to change when it learns."""
        return compute_probe(self._policy, sample_sequences(self._policy, *_COMPARED))

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
    """A version contains the policy's adapter, in the dtype of version 0's weights."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self._adapters = Adapters(policy)

    def ask(self, root: Path) -> JSON:
        dtype = read_manifest(root / version_path(0)).probe.dtype
        return {"names": list(self._adapters.weights()), "sequences": probe_sequences(root), "dtype": dtype}

    def remember(self) -> list[ProbeSequence]:
        """Return nothing: an adapter is compared with the base, and has its own name in the engine."""
        return []

    def probe(self, asked: JSON, parent: list[ProbeSequence]) -> Probe:
        """Score some sequences by base and adapter, and keep those where the two differ most."""
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
            write_tensors(folder / ADAPTER_WEIGHTS, make_header(layout, PYTORCH), layout, read)
            write_adapter_config(folder, self._adapters.describe(first.base_fingerprint))

        return write_version(root, manifest, write_files)


def _arithmetic(policy: Any) -> str:
    """Return the name of the dtype in which a policy computes."""
    return pytorch_name(next(policy.parameters()).dtype)


def _noise(dtype: str, arithmetic: str) -> float:
    """dtype: of the version's weights, and usually of the engine. arithmetic: dtype of the trainer."""
    return _NOISE if dtype == arithmetic == "float32" else _NARROW_NOISE


def _gap(own: ProbeSequence, other: ProbeSequence) -> float:
    return max(abs(a - b) for a, b in zip(own.logprobs, other.logprobs, strict=True))


def _contrast(own: ProbeSequence, other: ProbeSequence) -> Contrast:
    """Return the token of a sequence where two versions differ most."""
    gaps = [abs(a - b) for a, b in zip(own.logprobs, other.logprobs, strict=True)]
    place = gaps.index(max(gaps))
    return Contrast(own.token_ids[: place + 2], own.logprobs[place], other.logprobs[place])
