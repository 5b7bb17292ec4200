"""Processed logprobs equal what vLLM's own sampler computes."""

from __future__ import annotations

import pytest
import torch

from trainer_service.logprobs import SamplingTensors, at_temperature, entropy, processed_logprobs, token_logprobs


def sampling(k: int, temperature: float, top_p: float = 1.0, top_k: float = 0, min_p: float = 0.0) -> SamplingTensors:
    return SamplingTensors(*(torch.full((k,), float(x)) for x in (temperature, top_p, top_k, min_p)))


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(0.7, 0.9, 0), (1.0, 0.5, 0), (1.3, 0.9, 7), (1.0, 1.0, 3), (0.7, 1.0, 0)]
)
def test_they_agree_with_vllms_top_k_top_p(temperature, top_p, top_k):
    ops = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    logits = 3 * torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    k = torch.full((64,), top_k) if top_k else None
    p = torch.full((64,), top_p) if top_p < 1 else None
    theirs = ops.apply_top_k_top_p_pytorch((logits / temperature).clone(), k, p).log_softmax(-1)
    actions = theirs.exp().multinomial(1, generator=torch.Generator().manual_seed(1)).squeeze(-1)
    settings = sampling(64, temperature, top_p, top_k)
    ours = processed_logprobs(at_temperature(logits, settings), actions, settings)
    torch.testing.assert_close(ours, theirs.gather(-1, actions.unsqueeze(-1)).squeeze(-1))


def sample_by_hand(logits: torch.Tensor, top_p: float, top_k: int, min_p: float) -> torch.Tensor:
    """Logprobs of one distribution after min-p, top-k and top-p: tokens from the likeliest on, while the mass before
    each is below top-p."""
    probs = logits.double().softmax(-1)
    probs[probs < min_p * probs.max()] = 0
    order = probs.argsort(descending=True).tolist()
    probs[order[top_k or len(order) :]] = 0
    probs, mass, kept = probs / probs.sum(), 0.0, []
    for token in order:
        if mass >= top_p:
            break
        kept.append(token)
        mass += float(probs[token])
    result = torch.full_like(probs, -torch.inf)
    result[kept] = (probs[kept] / probs[kept].sum()).log()
    return result.float()


@pytest.mark.parametrize("likeliest", [4, 16, 1024])
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_they_are_those_of_sampling_by_hand(likeliest, spread, monkeypatch):
    monkeypatch.setattr("trainer_service.logprobs.LIKELIEST", likeliest)
    draw = torch.Generator().manual_seed(0)
    logits = spread * torch.randn(200, 60, generator=draw)
    top_p = torch.tensor([1.0, 0.9, 0.37, 1e-6])[torch.randint(0, 4, (200,), generator=draw)]
    top_k = torch.tensor([0, 1, 7, 30])[torch.randint(0, 4, (200,), generator=draw)]
    min_p = torch.tensor([0.0, 0.05, 0.5])[torch.randint(0, 3, (200,), generator=draw)]
    actions = logits.softmax(-1).multinomial(1, generator=draw).squeeze(-1)
    found = processed_logprobs(logits, actions, SamplingTensors(torch.ones(200), top_p, top_k.float(), min_p))
    for row in range(200):
        by_hand = sample_by_hand(logits[row], float(top_p[row]), int(top_k[row]), float(min_p[row]))
        torch.testing.assert_close(found[row], by_hand[actions[row]], msg=f"{row}")


def test_min_p_removes_tokens_below_a_fraction_of_the_highest_probability():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    settings = sampling(1, 1.0, min_p=0.4)
    inside = processed_logprobs(logits, torch.tensor([0]), settings)
    assert inside.exp().item() == pytest.approx(0.5 / 0.8)
    assert processed_logprobs(logits, torch.tensor([2]), settings).item() == -torch.inf


def test_greedy_rows_count_as_temperature_one():
    logits = torch.randn(3, 9)
    settings = sampling(3, 0.0, top_p=0.1)
    torch.testing.assert_close(at_temperature(logits, settings), logits)
    actions = logits.argmax(-1)
    torch.testing.assert_close(processed_logprobs(logits, actions, settings), token_logprobs(logits, actions))


def test_the_entropy_of_a_uniform_distribution_is_the_logarithm_of_its_size():
    assert entropy(torch.zeros(1, 8)).item() == pytest.approx(torch.log(torch.tensor(8.0)).item())
