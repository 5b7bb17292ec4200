"""Rows become trajectories, trajectories packed tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from shared.experience import Experience, Sampling, Tokens
from tests.models import make_tiny_model
from trainer_service.batch import assemble, gather, pack, scatter
from trainer_service.logprobs import at_temperature, token_logprobs
from trainer_service.models import load_causal_lm, logits_at


def row(
    id_: int, prompt: list[int], reply: list[int], reward: float = 0.0, run: str | None = None, version: int = 0
) -> Experience:
    tokens = Tokens(np.array(prompt, np.int32), np.array(reply, np.int32), -np.ones(len(reply), np.float32))
    return Experience(id_, f"m{id_}", 0, None, run and "task", run, f"m{id_}", version, reward, 0.0, tokens, Sampling())


def test_turns_of_a_run_are_merged_when_the_tokens_allow_it():
    first = row(1, [1, 2], [3, 4], reward=0.5, run="r", version=1)
    second = row(2, [1, 2, 3, 4, 5, 6], [7], reward=1.0, run="r", version=2)
    (merged,) = assemble([second, first])
    assert merged.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert merged.token_actions.tolist() == [3, 4, 7]
    assert merged.rewards.tolist() == [0, 0.5, 1.0]
    assert merged.versions.tolist() == [1, 1, 2]
    assert merged.row_ids == [1, 2]


def test_turns_stay_apart_when_a_token_differs_or_the_runs_do():
    first = row(1, [1, 2], [3, 4], run="r")
    assert len(assemble([first, row(2, [1, 2, 3, 9, 5], [7], run="r")])) == 2
    assert len(assemble([first, row(2, [1, 2, 3, 4, 5], [7], run="other")])) == 2
    assert len(assemble([row(1, [1], [2]), row(2, [1, 2, 3], [4])])) == 2


def test_a_row_is_packed_within_its_budget_and_a_longer_one_goes_alone():
    batch = assemble([row(n, list(range(n + 1)), [1, 2]) for n in range(1, 20)])
    micros = pack(batch, range(len(batch)), max_tokens=16)
    assert sorted(index for micro in micros for index in micro.members) == list(range(len(batch)))
    for micro in micros:
        assert micro.input_ids_1T.shape[1] <= 16 or len(micro.members) == 1


def test_scatter_undoes_gather():
    batch = assemble([row(n, [1] * n, [1] * (n % 3 + 1)) for n in range(1, 12)])
    arrays = [np.arange(len(t.actions), dtype=np.float32) + 10 * n for n, t in enumerate(batch)]
    back: list[np.ndarray] = [np.empty(0, np.float32)] * len(batch)
    for micro in pack(batch, range(len(batch)), max_tokens=20):
        scatter(gather(arrays, micro), micro, back)
    for before, after in zip(arrays, back, strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    torch.set_num_threads(1)
    folder: Path = make_tiny_model(tmp_path_factory.mktemp("model"))
    return load_causal_lm(folder).eval()


def test_logprobs_of_packed_sequences_equal_those_of_each_alone(model):
    draw = np.random.default_rng(0)
    rows = [
        row(n, draw.integers(0, 200, 4 + n % 7).tolist(), draw.integers(0, 200, 1 + n % 4).tolist())
        for n in range(1, 15)
    ]
    batch = assemble(rows)
    packed: list[np.ndarray] = [np.empty(0, np.float32)] * len(batch)
    with torch.no_grad():
        micros = pack(batch, range(len(batch)), max_tokens=64)
        assert len(micros) < len(batch) / 3
        for micro in micros:
            logits = logits_at(model, micro.input_ids_1T, micro.position_ids_1T, micro.keep_K)
            scatter(token_logprobs(at_temperature(logits, micro.sampling), micro.actions_K), micro, packed)
        for trajectory, values in zip(batch, packed, strict=True):
            ids = torch.from_numpy(trajectory.token_ids)
            alone = model(input_ids=ids.unsqueeze(0)).logits[0].log_softmax(-1)
            expected = [float(alone[position - 1, ids[position]]) for position in trajectory.actions]
            np.testing.assert_allclose(values, expected, atol=2e-6)
