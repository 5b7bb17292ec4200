"""Dropout is off in training, also in layers that are computed again: precomputed numbers are of the same policy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support import architectures
from trainer_service.models import Actor, ActorCritic, checkpoint_layers, prepare
from trainer_service.packing import pack
from trainer_service.trajectories import sequence_alone


@pytest.mark.parametrize("kind", [Actor, ActorCritic])
def test_layers_that_are_computed_again_drop_nothing(kind):
    model = architectures.make("opt", dropout=0.5, layerdrop=0.5, num_hidden_layers=8).to(torch.float64)
    prepare(model)
    (micro,) = pack([sequence_alone(np.arange(5, 25), 4)], [0], 100)
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            checkpoint_layers(model)
        module = kind(model).train()
        if kind is ActorCritic:
            torch.nn.init.ones_(module.value_head.weight)
        scores = module(micro)
        sum(one.sum() for one in scores.values()).backward()
        found.append(({n: p.grad.clone() for n, p in module.named_parameters()}, scores))
        module.zero_grad()
    (gradients, scores), (again, computed_again) = found
    torch.testing.assert_close(computed_again, scores)
    torch.testing.assert_close(again, gradients)
    layers = [layer for layer in module.modules() if hasattr(layer, "self_attn")]
    assert layers and all(layer.training for layer in layers), "they were computed again"
