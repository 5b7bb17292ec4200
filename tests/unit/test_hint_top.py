"""The teacher's likeliest tokens and all others as one class, against float64 over the whole vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shared.config import HintConfig
from tests.support.batches import ALONE, batch_of, precomputed, sequence
from tests.unit.test_head import D, K, V, chunks, sampling  # noqa: F401 — a fixture
from trainer_service.algorithms.hint import Hint
from trainer_service.algorithms.seam import Words
from trainer_service.algorithms.surrogates import divergence_with_tail
from trainer_service.head import LogitShape, Question, ScoringHead
from trainer_service.logprobs import at_temperature
from trainer_service.packing import pack
from trainer_service.parts import Part, Work, others_of

VOCABULARY, TOP = 11, 3


def coarse(p: torch.Tensor, q: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """Σ p log(p/q) over the classes that the likeliest tokens and the rest make, with the rest summed up."""
    rest = torch.ones(VOCABULARY, dtype=torch.float64)
    rest[top] = 0
    mine, theirs = (torch.cat([one[top], (one * rest).sum()[None]]) for one in (p, q))
    return (mine * (mine / theirs).log()).sum()


def test_the_divergence_and_its_gradient_are_those_of_the_coarser_distributions():
    torch.manual_seed(0)
    teacher, logits = torch.randn(4, VOCABULARY).double().softmax(-1), torch.randn(4, VOCABULARY, dtype=torch.float64)
    logits.requires_grad_()
    top = teacher.topk(TOP).indices
    policy = logits.log_softmax(-1)
    found = divergence_with_tail(teacher.gather(-1, top).log(), policy.gather(-1, top))
    expected = torch.stack([coarse(p, q.exp(), t) for p, q, t in zip(teacher, policy, top, strict=True)])
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(one.sum(), logits, retain_graph=True)[0] for one in (found, expected)]
    torch.testing.assert_close(*gradients)
    inside = torch.zeros_like(teacher).scatter(-1, top, 1.0).bool()
    torch.testing.assert_close(gradients[0][inside], (policy.exp() - teacher)[inside])


def test_where_both_agree_it_is_0_also_where_nothing_is_left_for_the_rest():
    certain = torch.tensor([[0.0, -40.0], [-0.5, -2.0]])
    assert divergence_with_tail(certain, certain.clone()).abs().max() == 0
    moved = torch.tensor([[0.0, -40.0]], requires_grad=True)
    divergence_with_tail(torch.tensor([[-1.0, -2.0]]), moved).sum().backward()
    assert moved.grad is not None and torch.isfinite(moved.grad).all()


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("shape", [LogitShape(), LogitShape(scale=2.0, cap=1.5)])
def test_a_head_scores_other_tokens_and_names_the_likeliest(chunks, shape, entropy_gradient):  # noqa: F811
    torch.manual_seed(0)
    layer = torch.nn.Linear(D, V, dtype=torch.float64)
    head, rows = ScoringHead.replacing(layer, shape), sampling(torch.float64)
    hidden = torch.randn(K, D, dtype=torch.float64, requires_grad=True)
    actions, others = torch.randint(0, V, (K,)), torch.randint(0, V, (K, 4))
    logits = layer(hidden) * shape.scale
    logits = logits if shape.cap is None else shape.cap * torch.tanh(logits / shape.cap)
    whole = at_temperature(logits, rows).log_softmax(-1)
    scores = head.score(
        hidden, Question(actions, rows, entropies=True, entropy_gradient=entropy_gradient, others=others, top=5)
    )
    expected = whole.gather(-1, actions[:, None])[:, 0], whole.gather(-1, others), -(whole.exp() * whole).sum(-1)
    found = scores["logprobs"], scores["others"], scores["entropy"]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(scores["top"][1], whole.topk(5).values)
    torch.testing.assert_close(whole.gather(-1, scores["top"][0]), scores["top"][1])
    assert not scores["top"][1].requires_grad
    weights = torch.randn(K, 6, dtype=torch.float64)
    inputs = [hidden, *layer.parameters()]
    sums = [
        (weights[:, 0] * own).sum() + (weights[:, 1:5] * other).sum() + entropy_gradient * (weights[:, 5] * h).sum()
        for own, other, h in (found, expected)
    ]
    for ours, theirs in zip(*(torch.autograd.grad(one, inputs) for one in sums), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("sampled_by", [-1.0, -0.1, -4.0], ids=["this one", "a surer one", "a less sure one"])
def test_the_loss_is_the_mean_divergence_at_the_actions_that_words_are_about(sampled_by):
    """Whatever the sampled tokens' own importance weights are: the divergence is the same whatever was sampled."""
    torch.manual_seed(1)
    batch = batch_of(sequence([0, 0, 0], [sampled_by] * 3), sequence([0, 0]))
    batch.words.update({0: [Words(np.array([7]), np.array([1, 2]))], 1: [Words(np.array([7]), np.array([0]))]})
    teacher = [torch.randn(count, VOCABULARY).double().softmax(-1) for count in (2, 1)]
    top = [one.topk(TOP) for one in teacher]
    algorithm = Hint(HintConfig(top_k=TOP, least_effect=0.0))
    seen = precomputed(
        batch,
        teacher=[np.full(2, -0.5, np.float32), np.full(1, -0.5, np.float32)],
        top=[one.indices.numpy() for one in top],
        top_logprobs=[one.values.log().float().numpy() for one in top],
    )
    units = algorithm.units(batch)
    work = Work(Part(algorithm), units, *algorithm.constants(batch, units, seen, {}))
    (micro,) = pack(batch.sequences, [0, 1], 1000)
    asked = others_of(micro, [work])
    policy = torch.randn(5, VOCABULARY, dtype=torch.float64).log_softmax(-1)
    assert asked is not None and asked.shape == (5, TOP)
    scores = {"logprobs": torch.full((5,), -1.0), "entropy": torch.zeros(5), "others": policy.gather(-1, asked)}
    loss = work.loss(micro, scores, work.size_of([0, 1]))
    places = dict(zip(micro.members, (0, micro.lengths[0]), strict=True))
    at = [places[0] + 1, places[0] + 2, places[1]]
    flat, likeliest = torch.cat(teacher), torch.cat([one.indices for one in top])
    expected = [coarse(flat[n], policy[row].exp(), likeliest[n]) for n, row in enumerate(at)]
    assert float(loss) == pytest.approx(float(torch.stack(expected).mean()), rel=1e-5)
    assert work.figures(ALONE)["kl_to_teacher"] == pytest.approx(float(loss), rel=1e-5)


def test_what_a_run_of_many_turns_with_words_keeps_grows_with_its_tokens_and_not_with_their_square():
    """Each turn has words, as after a comment on the whole run: an action belongs to one of them."""
    turns, size = 64, 2
    batch, policy = batch_of(sequence([0] * turns * size)), torch.randn(turns * size, VOCABULARY).log_softmax(-1)
    batch.words[0] = [Words(np.array([7]), np.arange(size * turn, size * (turn + 1))) for turn in range(turns)]
    top = [torch.randn(size, VOCABULARY).log_softmax(-1).topk(TOP) for _ in range(turns)]
    algorithm = Hint(HintConfig(top_k=TOP, least_effect=0.0))
    seen = precomputed(
        batch,
        teacher=[np.full(size, -0.5, np.float32)] * turns,
        top=[one.indices.numpy() for one in top],
        top_logprobs=[one.values.numpy() for one in top],
    )
    units = algorithm.units(batch)
    constants, figures = algorithm.constants(batch, units, seen, {})
    for name, arrays in constants.items():
        assert sum(map(len, arrays)) == turns * size, name
    work = Work(Part(algorithm), units, constants, figures)
    (micro,) = pack(batch.sequences, [0], 1000)
    asked = others_of(micro, [work])
    torch.testing.assert_close(asked, torch.cat([one.indices for one in top]))
    scores = {"logprobs": torch.full((len(policy),), -1.0), "entropy": torch.zeros(len(policy))}
    loss = work.loss(micro, {**scores, "others": policy.gather(-1, asked)}, work.size_of([0]))
    flat = torch.cat([one.values for one in top])
    assert float(loss) == pytest.approx(float(divergence_with_tail(flat, policy.gather(-1, asked)).mean()), rel=1e-5)
