"""Penalties are computed as vLLM's own sampler computes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shared.experience import Experience, Sampling, Tokens
from tests.support.batches import assemble
from trainer_service.logprobs import at_temperature
from trainer_service.packing import pack
from trainer_service.penalties import Penalties, penalized

VOCABULARY = 40


def turn(id_: int, prompt: list[int], n_reply: int, sampling: Sampling, draw: np.random.Generator) -> Experience:
    reply = draw.integers(0, VOCABULARY, n_reply).astype(np.int32)
    tokens = Tokens(np.array(prompt, np.int32), reply, -np.ones(n_reply, np.float32))
    return Experience(id_, f"m{id_}", 0, None, "t", "r", f"m{id_}", 0, 0.0, 0.0, tokens, sampling)


def by_vllm(row: Experience, logits_AV: torch.Tensor) -> torch.Tensor:
    from vllm.v1.sample.ops.penalties import apply_all_penalties

    s, found = row.sampling, []
    for number, logits_V in enumerate(logits_AV):
        penalties = (s.presence_penalty, s.frequency_penalty, s.repetition_penalty)
        prompt, so_far = torch.from_numpy(row.tokens.prompt_ids.astype(np.int64)), row.tokens.reply_ids[:number]
        values = (torch.tensor([value]) for value in penalties)
        found.append(apply_all_penalties(logits_V[None].clone(), prompt[None], *values, [so_far.tolist()])[0])
    return torch.stack(found)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_logits_after_penalties_are_those_of_vllm_for_every_turn_of_a_packed_row(temperature):
    pytest.importorskip("vllm")
    draw, noise = np.random.default_rng(0), torch.Generator().manual_seed(0)
    settings = [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": -0.25},
        {},
        {"repetition_penalty": 0.8, "presence_penalty": -1.0, "frequency_penalty": 2.0},
    ]
    rows: list[Experience] = []
    for id_, chosen in enumerate(settings):
        before = rows[-1].tokens if rows else Tokens(*(np.empty(0, np.int32),) * 2, np.empty(0, np.float32))
        prompt = [*before.prompt_ids, *before.reply_ids, *draw.integers(0, VOCABULARY, 5)] if id_ % 2 else [id_] * 9
        rows.append(turn(id_, prompt, 12, Sampling(temperature=temperature, **chosen), draw))
    sequences = assemble(rows)
    assert [sequence.row_ids for sequence in sequences] == [[0, 1], [2, 3]]
    (micro,) = pack(sequences, range(2), max_tokens=1000)
    by_row = [torch.randn(12, VOCABULARY, generator=noise) * 3 for _ in rows]
    order = [row_id for member in micro.members for row_id in sequences[member].row_ids]
    logits_KV = torch.cat([by_row[row_id] for row_id in order])
    divisor = temperature or 1.0
    expected_KV = torch.cat([by_vllm(rows[row_id], by_row[row_id]) for row_id in order]) / divisor
    assert micro.sampling.penalties is not None
    scaled_KV = at_temperature(logits_KV, micro.sampling)
    found_KV = penalized(scaled_KV, micro.sampling.penalties, torch.full((len(scaled_KV),), divisor))
    torch.testing.assert_close(found_KV, expected_KV, rtol=1e-5, atol=1e-5)
    chunk = slice(7, 31)
    part_KV = penalized(scaled_KV[chunk], micro.sampling.penalties.rows(chunk), torch.full((24,), divisor))
    torch.testing.assert_close(part_KV, found_KV[chunk])


def test_rows_without_penalties_cost_nothing():
    draw = np.random.default_rng(0)
    assert Penalties.of(assemble([turn(1, [1, 2], 3, Sampling(temperature=0.5, top_p=0.9), draw)])) is None
