"""Stage 7, update: train on a batch with the weighted losses of the configured algorithms.

Before the first step, everything that losses treat as constant is computed once. Then follow epochs × minibatches
optimizer steps. Each algorithm's loss is divided by its own size over the whole minibatch, so that neither packing nor
another algorithm changes it. Order and result depend only on the weights, the batch, the memory, the seed and the step:
on a CPU, training again on the same batch gives the same bits. Nothing here uses PyTorch's global generator.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Mapping
from functools import partial

import numpy as np
from torch import Tensor

from shared.config import TrainerConfig
from trainer_service.algorithms.seam import Algorithm, Batch, Floats, Memory, Needs, Precomputed, Unit
from trainer_service.backends.deepspeed import DeepSpeedBackend
from trainer_service.drift import Drift
from trainer_service.errors import UpdateError
from trainer_service.key_means import center_keys
from trainer_service.logprobs import Scores
from trainer_service.minibatches import blocks_of, even_minibatches
from trainer_service.packer import Packer
from trainer_service.packing import MicroBatch, Rows
from trainer_service.parts import Part, Work, needs_of, others_of
from trainer_service.past_policy import PastPolicy
from trainer_service.precompute import Arrays, Precompute, Reference
from trainer_service.shares import bound_shares, keys_of

Stats = dict[str, float]
_KEYS = "keys"  # entry in the memory for the means of keys, next to the parts' entries


class Updater:
    """Runs the optimizer steps of a batch. Owns the models and the algorithms' memory; does not access the ledger."""

    def __init__(
        self,
        backend: DeepSpeedBackend,
        reference: Reference | None,
        parts: Mapping[str, Part],
        config: TrainerConfig,
        rows: Rows = Rows.FOLDED,
        teachers: Mapping[str, Reference] | None = None,
        past: PastPolicy | None = None,
    ) -> None:
        """reference: scores by the base model; None: no part needs them. rows: row layout that all models support.

        teachers: scores by other models, for parts that learn from one. past: the teacher of `hint`; None: the policy
        at the start of a batch.
        """
        self.rows = rows
        self.backend = backend
        self.memory: dict[str, Memory] = {}  # by part, and one entry for keys
        # of the last update: precompute_seconds, train_seconds; tokens_in, tokens_computed of this rank's training
        self.costs: Stats = {}
        self._ranks = backend.ranks
        self._packer = Packer(backend.ranks, backend.device, config.max_tokens_per_micro_batch, rows)
        self.past = past
        own = {} if past is None else {"hint": past.scores}
        self._precompute = Precompute(backend, reference, self._packer, {**(teachers or {}), **own})
        self._parts = parts
        self._config = config
        needs = needs_of(parts.values())
        self._wanted = {"values": Needs.VALUES in needs, "entropy_gradient": Needs.ENTROPY in needs}

    def close(self) -> None:
        """Release the models' memory."""
        self.backend.close()

    def update(self, batch: Batch, *, step: int, version: int, ahead: int = 0) -> Stats:
        """Train on a batch. Returns figures for logs and plots.

        step: number of updates before this one. version: the last published version, or the one training started from.
        ahead: number of updates since then; 0: the models hold the version's weights.
        Raises UpdateError if a loss or gradient is not finite.
        """
        started = time.perf_counter()
        if self._config.center_keys:
            batch = center_keys(batch, self.memory.setdefault(_KEYS, {}))
        units = {name: part.algorithm.units(batch) for name, part in self._parts.items()}
        precomputed = self._gather(
            self._precompute.run(batch, {n: (p.algorithm, units[n]) for n, p in self._parts.items()})
        )
        works = {name: self._prepare(name, batch, units[name], precomputed) for name in self._parts if units[name]}
        drift = Drift(self._precompute, self._ranks, batch, precomputed.common)
        self.costs = {"precompute_seconds": time.perf_counter() - started}
        norms = self._train(batch, list(works.values()), step)
        figures = {name: work.figures(self._ranks) for name, work in works.items()}
        moved = drift.measure() | _norms(norms)
        self.costs["train_seconds"] = time.perf_counter() - started - self.costs["precompute_seconds"]
        if not all(math.isfinite(value) for shown in (moved, *figures.values()) for value in shown.values()):
            raise UpdateError(
                f"update {step + 1} gave a loss or gradient that is not finite; lower trainer.learning_rate"
            )
        if self.past is not None:
            self.past.updated()
        used = {row_id for work in works.values() for row_id in work.rows(batch)}
        stats = _stats(batch, precomputed.common["processed"], used, version, ahead)
        for name, shown in figures.items():
            prefix = f"{name}/" if len(self._parts) > 1 else ""
            stats |= {prefix + key: value for key, value in shown.items()}
        return stats | moved | {"seconds": time.perf_counter() - started}

    def try_steps(self, batch: Batch, algorithm: Algorithm) -> None:
        """Train twice on a batch with an algorithm that has no needs; the second step tests the result of the first.

        Raises UpdateError if a gradient is not finite.
        """
        units = algorithm.units(batch)
        constants, _ = algorithm.constants(batch, units, Precomputed([], [], [], []), {})
        norms = [self._train(batch, [Work(Part(algorithm), units, constants, {})], step=0) for _ in range(2)]
        if not np.isfinite(norms).all():
            raise UpdateError("a gradient is not finite")

    def _gather(self, precomputed: Arrays) -> Arrays:
        """Exchange the arrays among the ranks: of each array, the first copy that is not empty."""
        named = [precomputed.common, *precomputed.of_part.values()]
        flat = [array for one in named for arrays in one.values() for array in arrays]
        of_ranks = zip(*self._ranks.gather(flat), strict=True)
        found = iter([next((array for array in arrays if len(array)), arrays[0]) for arrays in of_ranks])
        common, *of_parts = [{name: [next(found) for _ in arrays] for name, arrays in one.items()} for one in named]
        return Arrays(common, dict(zip(precomputed.of_part, of_parts, strict=True)))

    def _prepare(self, name: str, batch: Batch, units: list[Unit], precomputed: Arrays) -> Work:
        """Compute the constants of one part's loss."""
        part, seen = self._parts[name], precomputed.seen_by(name)
        constants, figures = part.algorithm.constants(batch, units, seen, self.memory.setdefault(name, {}))
        constants, shown = bound_shares(constants, keys_of(batch, units), self._config.max_share_per_key)
        return Work(part, units, constants, figures | shown)

    def _train(self, batch: Batch, works: list[Work], step: int) -> list[list[float]]:
        """Run all optimizer steps on a batch. Returns the gradient norms of each step: policy, critic."""
        blocks = blocks_of(group for work in works for group in work.groups)
        costs = [sum(len(batch.sequences[place].token_ids) for place in block) for block in blocks]
        order = np.random.default_rng([self._config.seed, step])
        rate = min(1.0, (step + 1) / self._config.warmup_updates) if self._config.warmup_updates else 1.0
        norms = []
        self.costs |= {"tokens_in": 0.0, "tokens_computed": 0.0}
        for _ in range(self._config.epochs):
            for members in even_minibatches(costs, self._config.minibatches, order):
                chosen = [blocks[number] for number in members]
                places = [place for block in chosen for place in block]
                sizes = [work.size_of(places) for work in works]
                own = [chosen[number] for number in self._ranks.share([costs[number] for number in members])]
                micros = self._packer.pack(batch.sequences, [place for block in own for place in block], own)
                self.costs["tokens_in"] += sum(micro.tokens_in for micro in micros)
                self.costs["tokens_computed"] += sum(micro.input_ids_1T.numel() for micro in micros)
                shares = [partial(self._loss, micro, works, sizes) for micro in micros]
                fill = [partial(self._loss, micro, [], []) for micro in self._packer.fill(batch.sequences, len(micros))]
                norms.append(self.backend.step([*shares, *fill], rate))
        return norms

    def _loss(self, micro: MicroBatch, works: list[Work], sizes: list[float]) -> Tensor:
        """Return the micro-batch's share of the minibatch's loss: Σ weight · loss / size over the parts."""
        others = others_of(micro, works)
        asked = {} if others is None else {"others": others.to(self.backend.device)}
        scores: Scores = self.backend(micro, entropies=True, **self._wanted, **asked)
        # ZeRO requires every parameter in every backward pass, also where a part has no rows
        total = 0.0 * (scores["logprobs"].sum() + (scores["values"].sum() if "values" in scores else 0.0))
        for work, size in zip(works, sizes, strict=True):
            total = total + work.loss(micro, scores, size)
        return total * self._ranks.size  # DeepSpeed averages over the ranks


def _norms(of_steps: list[list[float]]) -> Stats:
    """Return gradient norms before clipping: the mean over an update's steps, and the maximum of each model."""
    figures = {"grad_norm": float(np.mean([math.hypot(*norms) for norms in of_steps])) if of_steps else 0.0}
    for name, norms in zip(("policy", "critic"), zip(*of_steps, strict=True), strict=False):
        figures[f"grad_norm_{name}"] = max(norms)
    return figures


def _merged(batch: Batch) -> Stats:
    """Count the turns merged into the sequence of an earlier turn, and the other turns by reason."""
    turns, sequences = (sum(len(getattr(t, name)) for t in batch.trajectories) for name in ("turns", "sequences"))
    reasons = sum((t.unmerged for t in batch.trajectories), Counter[str]())
    return {"turns_merged": float(turns - sequences), **{f"turns_{why}": float(n) for why, n in reasons.items()}}


def _stats(batch: Batch, processed: list[Floats], used: Collection[int], version: int, ahead: int) -> Stats:
    """Return the figures of a batch that all algorithms share; means are over tokens unless named otherwise.

    used: ids of the rows that some part learned from, or from an answer to them.
    """
    sampled = [place for places in batch.members for place in places]
    sequences = [batch.sequences[place] for place in sampled]
    versions = np.concatenate([sequence.versions for sequence in sequences])
    behind = np.maximum(version - versions, 0)  # a newer version was withdrawn after a crash
    rows = [row_id for sequence in sequences for row_id in sequence.row_ids]
    stats = {
        "rows": float(len(rows)),
        "rows_unused": float(sum(row_id not in used for row_id in rows)),
        "tokens": float(len(versions)),
        **({"reward_mean": float(np.mean(batch.rewards))} if batch.rewards else {}),
        "staleness_versions": float(behind.mean()),
        "staleness_versions_max": float(behind.max()),
        **({"rehearsed": float(len(batch.rehearsed))} if batch.rehearsed else {}),
        **{f"unused/{reason}": count for reason, count in batch.unused.items()},
        **_merged(batch),
    }
    precomputed = [place for place in sampled if len(processed[place])]
    if precomputed:
        gaps = np.concatenate([np.abs(processed[p] - batch.sequences[p].behaviour) for p in precomputed])
        versions, crossed, masked = (
            np.concatenate([getattr(batch.sequences[place], name) for place in precomputed])
            for name in ("versions", "crossed", "masked")
        )
        # if the same weights sampled and scored a token, a gap is an error in our computation
        gaps = gaps[(versions == version) & ~crossed & ~masked & (ahead == 0)]
        known = gaps[~np.isinf(gaps)]  # infinite: rounding moved the token outside top-p, top-k or min-p
        if len(known):
            stats |= {"logprob_gap_mean": float(known.mean()), "logprob_gap_max": float(known.max())}
        if len(gaps):
            stats["outside_cut"] = 1.0 - len(known) / len(gaps)
    return stats
