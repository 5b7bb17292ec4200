"""Trajectories in packed rows: within the budget, nearly without gaps, and each as if it were alone."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.trainer.worker import packing_figures
from shared.experience import Sampling
from tests.support import architectures
from tests.support.batches import gather
from trainer_service import attention, head
from trainer_service.models import ActorCritic, ValueHead, prepare, score_actions
from trainer_service.packing import Rows, pack, scatter
from trainer_service.trajectories import TokenSequence, sequence_alone


def trajectory(token_ids: np.ndarray, replies: int = 5, sampling: tuple[float, ...] = (1, 1, 0, 0)) -> TokenSequence:
    """Its last tokens were sampled."""
    temperature, top_p, top_k, min_p = sampling
    how = Sampling(temperature, top_p, int(top_k), min_p)
    return sequence_alone(token_ids, len(token_ids) - replies, sampling=how)


def branches(vocabulary: int = 211) -> list[TokenSequence]:
    """A system prompt with two conversations, one of which branches, and two that share nothing."""
    draw = np.random.default_rng(0)
    system, turn = draw.integers(0, vocabulary, 19), draw.integers(0, vocabulary, 9)
    texts = [(system, turn, 11), (system, turn, 6), (system, 14), (23,), (8,)]
    return [
        trajectory(np.concatenate([draw.integers(0, vocabulary, p) if isinstance(p, int) else p for p in pieces]))
        for pieces in texts
    ]


def test_a_row_is_packed_within_its_budget_and_a_longer_one_goes_alone():
    draw = np.random.default_rng(0)
    batch = [trajectory(draw.integers(0, 99, 8 + 2 * n)) for n in range(30)]
    micros = pack(batch, range(len(batch)), max_tokens=40)
    assert sorted(index for micro in micros for index in micro.members) == list(range(len(batch)))
    for micro in micros:
        assert micro.input_ids_1T.shape[1] <= 40 or len(micro.members) == 1


def test_a_mix_of_lengths_leaves_few_gaps():
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(5.5, 0.8, 256), 16, 2048).astype(int)
    batch = [trajectory(draw.integers(0, 32_000, length)) for length in lengths]
    figures = packing_figures(pack(batch, range(256), 4096), 4096)
    assert figures["tokens_computed"] == figures["tokens_in"] == lengths.sum()
    assert figures["packing_efficiency"] >= 0.95


@pytest.mark.parametrize("budget", [4096, 8192])
def test_shared_beginnings_are_computed_once(budget):
    draw = np.random.default_rng(0)
    batch = []
    for _ in range(6):
        system = draw.integers(0, 32_000, draw.integers(50, 300))
        for _ in range(4):
            history = np.concatenate([system, draw.integers(0, 32_000, 60)])
            batch += [trajectory(np.concatenate([history, draw.integers(0, 32_000, 40)])) for _ in range(4)]
    distinct = len({t.token_ids[:end].tobytes() for t in batch for end in range(1, len(t.token_ids) + 1)})
    figures = packing_figures(pack(batch, range(len(batch)), budget), budget)
    assert figures["tokens_in"] > 3 * distinct
    assert figures["tokens_computed"] <= 1.05 * distinct


def test_a_tree_beyond_the_budget_is_cut_into_rows_that_repeat_little():
    draw = np.random.default_rng(0)
    system = draw.integers(0, 99, 64)
    batch = [trajectory(np.concatenate([system, draw.integers(0, 99, 32)])) for _ in range(100)]
    micros = pack(batch, range(100), 512)
    assert len(micros) == 8
    assert all(micro.input_ids_1T.shape[1] <= 512 for micro in micros)


def test_members_of_a_unit_share_a_row():
    draw = np.random.default_rng(0)
    batch = [trajectory(draw.integers(0, 99, draw.integers(8, 60))) for _ in range(40)]
    units = [tuple(pair) for pair in draw.permutation(40).reshape(20, 2)[:15].tolist()]
    micros = pack(batch, range(40), 128, units=units)
    assert sorted(index for micro in micros for index in micro.members) == list(range(40))
    assert all(len(set(unit) & set(micro.members)) != 1 for micro in micros for unit in units)


def test_one_sequence_a_row_and_unfolded_rows_can_be_had():
    batch = branches()
    assert [len(micro.members) for micro in pack(batch, range(5), 1000, Rows.SINGLE)] == [1] * 5
    (packed,) = pack(batch, range(5), 1000, Rows.PACKED)
    assert packed.input_ids_1T.shape[1] == packed.tokens_in == sum(len(t.token_ids) for t in batch)
    (folded,) = pack(batch, range(5), 1000)
    assert folded.input_ids_1T.shape[1] < packed.tokens_in


def test_scatter_undoes_gather():
    batch = branches()
    arrays = [np.arange(len(t.actions), dtype=np.float32) + 10 * n for n, t in enumerate(batch)]
    back: list[np.ndarray] = [np.empty(0, np.float32)] * len(batch)
    for micro in pack(batch, range(len(batch)), max_tokens=60):
        scatter(gather(arrays, micro), micro, back)
    for before, after in zip(arrays, back, strict=True):
        np.testing.assert_array_equal(before, after)


def alone(model: torch.nn.Module, one: TokenSequence) -> torch.Tensor:
    """Logprobs by the model's own forward pass."""
    device = next(model.parameters()).device
    ids, actions = torch.from_numpy(one.token_ids).to(device), torch.from_numpy(one.actions).to(device)
    logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
    return logits.log_softmax(-1)[actions - 1, ids[actions]]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("rows", [Rows.FOLDED, Rows.PACKED])
@pytest.mark.parametrize("name", architectures.PLAIN)
@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
def test_logprobs_and_gradients_are_those_of_each_sequence_alone(name, rows, kind, tolerance, monkeypatch):
    monkeypatch.setattr("trainer_service.head.CHUNK_BYTES", {"cpu": 0})  # many chunks
    torch.set_num_threads(1)
    theirs = architectures.make(name, attn_implementation="eager" if name in ("gemma2", "gpt_oss") else "sdpa").to(kind)
    ours = copy.deepcopy(theirs)
    prepare(ours)
    batch = branches()
    weights = [torch.linspace(-1, 1, len(t.actions), dtype=kind) * (n + 1) for n, t in enumerate(batch)]
    expected = [alone(theirs, one) for one in batch]
    sum(w @ x for w, x in zip(weights, expected, strict=True)).backward()
    (micro,) = pack(batch, range(len(batch)), 1000, rows)
    logprobs_K = score_actions(ours, micro)["logprobs"]
    assert logprobs_K.dtype == kind
    wanted_K = torch.cat([expected[index] for index in micro.members])
    torch.testing.assert_close(logprobs_K, wanted_K, rtol=tolerance, atol=tolerance)
    (torch.cat([weights[index] for index in micro.members]) @ logprobs_K).backward()
    found = gradients(ours)
    for key, gradient in gradients(theirs).items():
        assert float((found[key] - gradient).norm() / gradient.norm()) < tolerance, key


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("keeps_head", [False, True])
@pytest.mark.parametrize("name", architectures.NAMES)
def test_each_member_of_a_unit_is_computed_alone_if_a_row_contains_one_sequence(name, keeps_head):
    torch.set_num_threads(1)
    theirs = architectures.make(name, attn_implementation="eager").to(torch.float64)
    ours = copy.deepcopy(theirs)
    prepare(ours)
    if keeps_head:
        head.remove(ours)
    batch = branches()
    expected = [alone(theirs, one) for one in batch]
    micros = pack(batch, range(5), 1000, Rows.SINGLE, units=[(3, 0, 4)])
    assert sorted(sorted(micro.members) for micro in micros) == [[0, 3, 4], [1], [2]]
    sum(x.sum() for x in expected).backward()
    for micro in micros:
        logprobs_K = score_actions(ours, micro)["logprobs"]
        wanted_K = torch.cat([expected[index] for index in micro.members])
        torch.testing.assert_close(logprobs_K, wanted_K, rtol=1e-6, atol=1e-6)
        logprobs_K.sum().backward()
    found = gradients(ours)
    for key, gradient in gradients(theirs).items():
        assert float((found[key] - gradient).norm() / gradient.norm()) < 1e-5, key


def varlen_by_hand(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """What PyTorch's varlen_attn computes on a GPU, by its documentation: the last query of each sequence stands at
    the last key, and the window says how many keys before and after its own a query sees, -1: all."""
    assert cu_q.dtype == cu_k.dtype == torch.int32 and enable_gqa
    assert max_q == int(cu_q.diff().max()) and max_k == int(cu_k.diff().max())
    assert int(cu_q[-1]) == len(query) and int(cu_k[-1]) == len(key) == len(value)
    outputs = []
    for n in range(len(cu_q) - 1):
        q, k, v = (
            t[starts[n] : starts[n + 1]].transpose(0, 1) for t, starts in ((query, cu_q), (key, cu_k), (value, cu_k))
        )
        at_Q1 = (torch.arange(q.shape[1]) + k.shape[1] - q.shape[1]).unsqueeze(1)
        distance_QS = at_Q1 - torch.arange(k.shape[1])
        before, after = (width if width >= 0 else k.shape[1] for width in window_size)
        seen_QS = (distance_QS <= before) & (distance_QS >= -after)
        outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen_QS, scale=scale, enable_gqa=True))
    return torch.cat(outputs, dim=1).transpose(0, 1)


@pytest.mark.parametrize("rows", [Rows.FOLDED, Rows.PACKED])
@pytest.mark.parametrize("name", ["qwen2", "mistral"])
def test_the_gpus_kernel_is_asked_for_the_same(name, rows, monkeypatch):
    torch.set_num_threads(1)
    model = architectures.make(name).to(torch.float64)
    prepare(model)
    (micro,) = pack(branches(), range(5), 1000, rows)
    found = []
    for kernel in (False, True):
        monkeypatch.setattr(attention, "_has_kernel", lambda *_, kernel=kernel: kernel)
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_by_hand)
        logprobs_K = score_actions(model, micro)["logprobs"]
        logprobs_K.sum().backward()
        found.append({"logprobs": logprobs_K.detach(), **gradients(model)})
    for key, expected in found[0].items():
        torch.testing.assert_close(found[1][key], expected)


@pytest.mark.parametrize(
    ("head", "kind", "capability", "taken"),
    [
        (64, torch.bfloat16, (9, 0), True),
        (256, torch.float16, (8, 0), True),
        (100, torch.bfloat16, (9, 0), False),  # not a multiple of 8
        (288, torch.bfloat16, (9, 0), False),
        (64, torch.float32, (9, 0), False),
        (64, torch.bfloat16, (7, 5), False),
    ],
)
def test_the_gpu_kernel_is_used_only_for_supported_inputs(head, kind, capability, taken, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    heads = SimpleNamespace(is_cuda=True, dtype=kind, shape=(1, 4, 10, head), device="cuda:0")
    layout = attention.Layout(())
    assert attention._has_kernel(heads, heads, attention._Options(layout, None, None, None, None)) is taken
    assert not attention._has_kernel(heads, heads, attention._Options(layout, None, None, 30.0, None)), "no soft cap"
    sinks = torch.zeros(4)
    assert not attention._has_kernel(heads, heads, attention._Options(layout, None, None, None, sinks)), "no sinks"


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_computes_again_in_the_same_rows(reentrant):
    torch.set_num_threads(1)
    model = architectures.make("qwen2").to(torch.float64)
    prepare(model)
    micros = pack(branches(), range(5), 60)
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.train()
        sum(score_actions(model, micro)["logprobs"].sum() for micro in micros).backward()
        found.append(gradients(model))
    for key, gradient in found[0].items():
        torch.testing.assert_close(found[1][key], gradient)


def test_the_critic_computes_the_same_values_in_packed_rows():
    module = ActorCritic(architectures.make("llama").to(torch.float64))
    prepare(module.policy)
    prepare(module.trunk)
    module.double()
    torch.nn.init.normal_(module.value_head.weight)
    batch = branches()
    values: list[np.ndarray] = [np.empty(0, np.float32)] * 5
    for budget in (1, 1000):
        previous = list(values)
        with torch.no_grad():
            for micro in pack(batch, range(5), budget):
                scatter(module(micro)["values"], micro, values)
    for before, after in zip(previous, values, strict=True):
        np.testing.assert_allclose(before, after, rtol=1e-5)


def test_a_critic_s_head_adds_up_in_float32_whatever_its_weights_are():
    torch.manual_seed(0)
    head = ValueHead(256).to(torch.bfloat16)
    torch.nn.init.normal_(head.weight)
    hidden = torch.randn(9, 256).to(torch.bfloat16)
    assert head(hidden).dtype == torch.float32
    torch.testing.assert_close(head(hidden), (hidden.double() @ head.weight.double().T)[:, 0].float())


def test_padding_is_refused():
    model = architectures.make("qwen2")
    prepare(model)
    with pytest.raises(ValueError, match="padded"):
        model(input_ids=torch.ones(1, 3, dtype=torch.long), attention_mask=torch.tensor([[0, 1, 1]]))
