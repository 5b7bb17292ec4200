"""Stage 7, update: a batch of trajectories becomes new weights, by the algorithm's loss through DeepSpeed.

Before the first step everything the loss takes as constant is computed once: proximal and reference logprobs, values,
advantages, importance weights. Then epochs × minibatches optimizer steps. Order and result depend only on the weights,
the batch, the seed and the step, so a batch trained again after a crash gives the same bits on a CPU.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.config import TrainerConfig
from shared.log import StageLogger
from trainer_service.algorithms import ppo
from trainer_service.backends.deepspeed import DeepSpeedBackend
from trainer_service.batch import Floats, MicroBatch, Trajectory, gather, pack, scatter
from trainer_service.errors import UpdateError
from trainer_service.logprobs import SamplingTensors, at_temperature, entropy, processed_logprobs, token_logprobs
from trainer_service.models import logits_at

log = StageLogger("update")
Stats = dict[str, float]


@dataclass(slots=True)
class Before:
    """What stands before the first step: one array [A] for each trajectory."""

    proximal: list[Floats]
    processed: list[Floats]
    reference: list[Floats]
    values: list[Floats]


class PPOUpdate:
    """Turns batches into optimizer steps. Owns the models; knows nothing of ledger or versions."""

    def __init__(self, backend: DeepSpeedBackend, reference: torch.nn.Module, config: TrainerConfig) -> None:
        self.backend = backend
        self._reference = reference.to(backend.device).eval().requires_grad_(False)
        self._config = config

    def update(self, batch: list[Trajectory], step: int, version: int) -> Stats:
        """Train on the batch.

        step: updates done before this one. version: the version whose weights the models hold now.
        Returns figures for logs and plots. Raises UpdateError when the result is not finite.
        """
        started = time.perf_counter()
        settings = self._config.ppo
        before = self._look(batch)
        estimates = ppo.estimate([t.rewards for t in batch], before.proximal, before.reference, before.values, settings)
        weights = [
            ppo.importance_weights(p, t.behaviour, settings.importance_cap)
            for p, t in zip(before.processed, batch, strict=True)
        ]
        sums: dict[str, float] = {}
        norms: list[float] = []
        order = np.random.default_rng([self._config.seed, step])
        for _ in range(settings.epochs):
            shuffled = order.permutation(len(batch))
            for part in np.array_split(shuffled, min(settings.minibatches, len(batch))):
                norms.append(self._step(batch, part.tolist(), before, estimates, weights, sums))
        if not all(math.isfinite(value) for value in (*norms, *sums.values())):
            raise UpdateError(
                f"update {step + 1} gave a loss or gradient that is not finite; lower trainer.learning_rate"
            )
        stats = self._stats(batch, before, estimates, weights, sums, version)
        return {**stats, "grad_norm": float(np.mean(norms)), "seconds": time.perf_counter() - started}

    @torch.no_grad()
    def _look(self, batch: list[Trajectory]) -> Before:
        """Proximal, processed and reference logprobs and values, for every sampled token."""
        empty: list[Floats] = [np.empty(0, np.float32)] * len(batch)
        before = Before(list(empty), list(empty), list(empty), list(empty))
        self.backend.module.eval()
        for micro in self._pack(batch, range(len(batch))):
            logits_KV, values_K = self.backend(micro.input_ids_1T, micro.position_ids_1T, micro.keep_K)
            scaled_KV = at_temperature(logits_KV, micro.sampling)
            scatter(token_logprobs(scaled_KV, micro.actions_K), micro, before.proximal)
            scatter(processed_logprobs(scaled_KV, micro.actions_K, micro.sampling), micro, before.processed)
            scatter(values_K, micro, before.values)
            reference_KV = logits_at(self._reference, micro.input_ids_1T, micro.position_ids_1T, micro.keep_K)
            reference_KV = at_temperature(reference_KV, micro.sampling)
            scatter(token_logprobs(reference_KV, micro.actions_K), micro, before.reference)
        return before

    def _step(
        self,
        batch: list[Trajectory],
        members: list[int],
        before: Before,
        estimates: ppo.Estimates,
        weights: list[Floats],
        sums: dict[str, float],
    ) -> float:
        """One optimizer step on the named trajectories. Adds to `sums`; returns the gradient's norm."""
        tokens = sum(len(batch[index].actions) for index in members)

        def share(micro: MicroBatch) -> Tensor:
            device = self.backend.device
            targets = ppo.Targets(
                *(
                    gather(arrays, micro).to(device)
                    for arrays in (before.proximal, weights, estimates.advantages, estimates.returns, before.values)
                )
            )
            logits_KV, values_K = self.backend(micro.input_ids_1T, micro.position_ids_1T, micro.keep_K)
            scaled_KV = at_temperature(logits_KV, micro.sampling)
            if self._config.ppo.entropy_coef > 0:
                entropy_K = entropy(scaled_KV)
            else:
                with torch.no_grad():
                    entropy_K = entropy(scaled_KV)
            logprobs_K = token_logprobs(scaled_KV, micro.actions_K)
            total, parts = ppo.loss(logprobs_K, entropy_K, values_K, targets, self._config.ppo, tokens)
            for name, value in parts.items():
                sums[name] = sums.get(name, 0.0) + float(value)
            sums["tokens"] = sums.get("tokens", 0.0) + len(logprobs_K)
            return total

        micros = self._pack(batch, members)
        return self.backend.step([lambda micro=micro: share(micro) for micro in micros])  # type: ignore[misc]

    def _pack(self, batch: list[Trajectory], members: range | list[int]) -> list[MicroBatch]:
        device = self.backend.device
        micros = pack(batch, members, self._config.max_tokens_per_micro_batch)
        return micros if device.type == "cpu" else [_to_device(micro, device) for micro in micros]

    def _stats(
        self,
        batch: list[Trajectory],
        before: Before,
        estimates: ppo.Estimates,
        weights: list[Floats],
        sums: dict[str, float],
        version: int,
    ) -> Stats:
        """Figures of one update, averaged over tokens unless their name says otherwise."""
        tokens = sums.pop("tokens")
        returns, values = np.concatenate(estimates.returns), np.concatenate(before.values)
        versions = np.concatenate([t.versions for t in batch])
        behaviour = np.concatenate([t.behaviour for t in batch])
        own = versions == version  # sampled by the very weights that recompute it: any gap is an error of ours
        gaps = np.abs(np.concatenate(before.processed) - behaviour)[own]
        rows = sum(len(t.row_ids) for t in batch)
        return {
            "rows": float(rows),
            "tokens": float(len(behaviour)),
            "reward_mean": float(sum(t.rewards.sum() for t in batch)) / rows,
            "kl_to_reference": estimates.kl_to_reference,
            "explained_variance": float(1 - np.var(returns - values) / (np.var(returns) + 1e-8)),
            "importance_weight": float(np.concatenate(weights).mean()),
            "logprob_gap_mean": float(gaps.mean()) if len(gaps) else 0.0,
            "logprob_gap_max": float(gaps.max()) if len(gaps) else 0.0,
            "staleness_versions": float((version - versions).mean()),
            **{name: value / tokens for name, value in sums.items()},
        }


def _to_device(micro: MicroBatch, device: torch.device) -> MicroBatch:
    sampling = micro.sampling
    return MicroBatch(
        micro.input_ids_1T.to(device),
        micro.position_ids_1T.to(device),
        micro.keep_K.to(device),
        micro.actions_K.to(device),
        SamplingTensors(
            *(t.to(device) for t in (sampling.temperature_K, sampling.top_p_K, sampling.top_k_K, sampling.min_p_K))
        ),
        micro.members,
        micro.lengths,
    )
