"""Builds the models that the configured algorithms need, by `model.kind`.

`full`: policy, critic and reference are separate models. `lora`: one frozen base model, with one adapter for the policy
and one for the critic; the reference is the base without adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shared.config import Config
from shared.versions import read_manifest, version_path
from trainer_service.adapters import CRITIC, POLICY, AdaptedActorCritic, add_adapters, base_scores
from trainer_service.algorithms.seam import Needs
from trainer_service.models import (
    Actor,
    ActorCritic,
    checkpoint_layers,
    load_prepared,
    round_weights,
    score_actions,
    tie_equal_embeddings,
)
from trainer_service.packing import Rows
from trainer_service.precompute import Reference
from trainer_service.self_test import check_rows


@dataclass(frozen=True, slots=True)
class Models:
    """Models ready for the optimizer."""

    policy: Any  # the causal LM that is published
    module: nn.Module  # the module that is trained: an Actor
    own: list[nn.Parameter]  # parameters of the policy
    critic: list[nn.Parameter]  # parameters of the critic; empty: no algorithm needs values
    reference: Callable[[torch.device], Reference] | None  # by device; None: no algorithm needs it
    others: list[Any] = field(default_factory=list)  # further models of the policy's architecture


def assemble(config: Config, start: Path, needs: Needs, *, bf16: bool) -> Models:
    """Load the models. start: folder of the version that the policy starts from. Raises StartupError."""
    make = adapted_models if config.model.kind == "lora" else full_models
    return make(config, start, needs, bf16)


def full_models(config: Config, start: Path, needs: Needs, bf16: bool) -> Models:
    """Build separate models for policy, critic and reference."""
    policy = load_prepared(start)
    tie_equal_embeddings(policy)
    if config.trainer.gradient_checkpointing:
        checkpoint_layers(policy)
    others, reference = [], None
    if Needs.REFERENCE in needs:
        frozen = load_prepared(config.root / version_path(0))
        if bf16:
            round_weights(frozen, torch.bfloat16)
        others.append(frozen)
        reference = partial(_frozen_scores, frozen)
    own = list(policy.parameters())
    if Needs.VALUES not in needs:
        return Models(policy, Actor(policy), own, [], reference, others)
    module = ActorCritic(policy)
    return Models(policy, module, own, module.critic_parameters(), reference, [*others, module.trunk])


def adapted_models(config: Config, start: Path, needs: Needs, bf16: bool) -> Models:
    """Build one frozen base model with adapters."""
    policy = load_prepared(config.root / version_path(0))
    tie_equal_embeddings(policy)
    if bf16:
        round_weights(policy, torch.bfloat16)  # DeepSpeed would round later, next to the complete float32 copy
    names = [POLICY, *([CRITIC] if Needs.VALUES in needs else [])]
    adapters = add_adapters(policy, config.model.lora, names, config.trainer.seed)
    if read_manifest(start).kind == "lora":
        adapters.load(start)
    if config.trainer.gradient_checkpointing:
        checkpoint_layers(policy, context_fn=adapters.checkpoint_contexts)
    score = partial(score_actions, policy)
    reference = (lambda _: partial(base_scores, adapters, score)) if Needs.REFERENCE in needs else None
    own = adapters.parameters(POLICY)
    if Needs.VALUES not in needs:
        return Models(policy, Actor(policy), own, [], reference)
    module = AdaptedActorCritic(policy, adapters)
    return Models(policy, module, own, module.critic_parameters(), reference)


def frozen_teachers(config: Config, device: torch.device, *, bf16: bool) -> tuple[dict[str, Reference], Rows]:
    """Return scores by the frozen teacher model of each algorithm that has one, and the densest row layout that all
    of these models compute correctly. Raises StartupError."""
    folder = config.trainer.distill.path
    if "distill" not in config.trainer.parts or folder is None:
        return {}, Rows.FOLDED
    model = load_prepared(Path(folder))
    if bf16:
        round_weights(model, torch.bfloat16)
    scores = _frozen_scores(model, device)
    return {"distill": scores}, check_rows(model)


def _frozen_scores(model: Any, device: torch.device) -> Reference:
    return partial(score_actions, model.to(device).eval().requires_grad_(False))
