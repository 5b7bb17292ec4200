"""Scores in chunks equal those of the whole logits, gradients included, without holding them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support import architectures
from tests.unit.test_packing import branches
from trainer_service.head import LogitShape, Question, ScoringHead
from trainer_service.logprobs import SamplingTensors, at_temperature, entropy, processed_logprobs, token_logprobs
from trainer_service.models import prepare, score_actions
from trainer_service.packing import pack
from trainer_service.penalties import Penalties

K, V, D = 137, 53, 8


def sampling(dtype: torch.dtype = torch.float32) -> SamplingTensors:
    """Every kind of cut, and greedy tokens."""
    number = torch.arange(K)
    return SamplingTensors(
        temperature_K=torch.tensor([0.7, 1.0, 1.4, 0.0])[number % 4].to(dtype),
        top_p_K=torch.tensor([1.0, 0.8, 0.5])[number % 3].to(dtype),
        top_k_K=torch.tensor([0.0, 5.0])[number % 2].to(dtype),
        min_p_K=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.1])[number % 5].to(dtype),
        penalties=penalties(dtype),
    )


def penalties(dtype: torch.dtype) -> Penalties:
    """One reply of K tokens behind a prompt of three, under all penalties."""
    tokens, number = torch.arange(3 + K) * 7 % V, torch.arange(K)
    how = (torch.full((K,), value, dtype=dtype) for value in (1.3, 0.2, -0.1))
    return Penalties(tokens, torch.zeros_like(number), torch.full_like(number, 3), 3 + number, *how)


@pytest.fixture(params=["one chunk", "many chunks", "many chunks, kept"])
def chunks(request, monkeypatch):
    if request.param != "one chunk":
        monkeypatch.setattr("trainer_service.head.CHUNK_BYTES", {"cpu": 0})
        monkeypatch.setattr("trainer_service.head.KEPT_BYTES", 8 * K * V if "kept" in request.param else 0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [LogitShape(), LogitShape(scale=0.5), LogitShape(scale=2.0, cap=1.5)])
def test_scores_and_gradients_are_those_of_the_whole_logits(chunks, shape, bias):
    torch.manual_seed(0)
    layer = nn.Linear(D, V, bias=bias, dtype=torch.float64)
    head = ScoringHead.replacing(layer, shape)
    hidden = torch.randn(K, D, dtype=torch.float64, requires_grad=True)
    actions, rows = torch.randint(0, V, (K,)), sampling(torch.float64)
    logits = layer(hidden) * shape.scale
    logits = logits if shape.cap is None else shape.cap * torch.tanh(logits / shape.cap)
    scaled = at_temperature(logits, rows)
    expected = token_logprobs(scaled, actions), entropy(scaled), processed_logprobs(scaled.detach(), actions, rows)
    question = Question(actions, rows, processed=True, entropies=True, entropy_gradient=True)
    scores = head.score(hidden, question)
    found = scores["logprobs"], scores["entropy"], scores["processed"]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not found[2].requires_grad
    weights = torch.randn(2, K, dtype=torch.float64)
    inputs = [hidden, *layer.parameters()]
    gradients = [
        torch.autograd.grad(weights[0] @ results[0] + weights[1] @ results[1], inputs) for results in (found, expected)
    ]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradients_are_those_of_finite_differences():
    torch.manual_seed(0)
    head = ScoringHead.replacing(nn.Linear(3, 7, dtype=torch.float64), LogitShape(cap=2.0))
    question = Question(
        torch.arange(5), SamplingTensors(*torch.tensor([[0.8] * 5, [1.0] * 5, [0.0] * 5, [0.0] * 5])),
        entropies=True, entropy_gradient=True,
    )  # fmt: skip
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: head(x, question)[:2], (hidden, *head.parameters()))


def test_what_is_not_asked_for_is_not_given_and_shown_entropies_have_no_gradient(chunks):
    head = ScoringHead.replacing(nn.Linear(D, V), LogitShape())
    hidden, actions = torch.randn(K, D, requires_grad=True), torch.zeros(K, dtype=torch.long)
    assert head.score(hidden, Question(actions, sampling())).keys() == {"logprobs"}
    scores = head.score(hidden, Question(actions, sampling(), entropies=True))
    assert scores["logprobs"].requires_grad
    assert not scores["entropy"].requires_grad
    scores["logprobs"].sum().backward()
    assert hidden.grad is not None


def test_narrow_weights_get_a_gradient_that_many_chunks_do_not_round(monkeypatch):
    torch.manual_seed(0)
    wide = nn.Linear(64, V, bias=False)
    narrow = nn.Linear(64, V, bias=False, dtype=torch.bfloat16)
    hidden, actions = torch.randn(4096, 64).bfloat16(), torch.randint(0, V, (4096,))
    question = Question(
        actions, SamplingTensors(torch.ones(4096), torch.ones(4096), torch.zeros(4096), torch.zeros(4096))
    )
    monkeypatch.setattr("trainer_service.head.CHUNK_BYTES", {"cpu": 0})
    with torch.no_grad():
        narrow.weight.copy_(wide.weight)
        wide.weight.copy_(narrow.weight)
    for layer, dtype in ((wide, torch.float32), (narrow, torch.bfloat16)):
        scores = ScoringHead.replacing(layer, LogitShape()).score(hidden.to(dtype), question)
        assert scores["logprobs"].dtype == torch.float32
        scores["logprobs"].sum().backward()
    error = (narrow.weight.grad.float() - wide.weight.grad).norm() / wide.weight.grad.norm()
    assert float(error) < 2**-8, "half a unit of bfloat16's last place, and what its logits are rounded by"


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "cohere", "granite"])
def test_a_models_own_scale_and_cap_are_applied(name):
    model = architectures.make(name)
    (micro,) = pack(branches(), range(5), 1000)
    prepare(model)
    ours = score_actions(model, micro)["logprobs"]
    assert isinstance(model.get_output_embeddings(), ScoringHead)
    logits = model(input_ids=micro.input_ids_1T, position_ids=micro.position_ids_1T, layout=micro.layout).logits
    theirs = token_logprobs(logits[0, micro.keep_K], micro.actions_K)
    torch.testing.assert_close(ours, theirs)


def test_the_head_changes_no_name_and_no_tie_of_a_models_parameters():
    plain, ours = (architectures.make("qwen2", tie_word_embeddings=True) for _ in range(2))
    prepare(ours)
    assert list(plain.state_dict()) == list(ours.state_dict())
    assert ours.get_output_embeddings().weight is ours.get_input_embeddings().weight
