"""At start the trainer finds out which rows a model computes right."""

from __future__ import annotations

import copy

import pytest
import torch

from shared.errors import StartupError
from tests.support import architectures
from tests.unit.test_packing import alone, branches
from trainer_service import attention, head, self_test
from trainer_service.errors import RankLost
from trainer_service.logprobs import Scores
from trainer_service.models import prepare, score_actions
from trainer_service.packing import MicroBatch, Rows, pack
from trainer_service.ranks import together
from trainer_service.self_test import check_rows

EXPECTED = {"qwen3_5": Rows.SINGLE, "lfm2": Rows.SINGLE}  # without their CUDA kernels


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", architectures.NAMES)
def test_the_rows_that_it_chooses_give_the_logprobs_of_each_sequence_alone(name, dtype, caplog):
    torch.set_num_threads(1)
    own = architectures.make(name, attn_implementation="eager").to(dtype)
    model = copy.deepcopy(own)
    prepare(model)
    rows = check_rows(model)
    assert rows is EXPECTED.get(name, Rows.FOLDED)
    said = [record for record in caplog.records if record.name == "flywheel.trainer"]
    assert len(said) == (rows is Rows.SINGLE)
    batch = branches()
    with torch.no_grad():
        for micro in pack(batch, range(5), 1000, rows):
            theirs = torch.cat([alone(own, batch[index]).float() for index in micro.members])
            distance = (score_actions(model, micro)["logprobs"] - theirs).abs()
            assert float(distance.mean()) < (1e-4 if dtype is torch.float32 else 0.1)


def test_a_model_whose_state_runs_along_the_row_leaks_without_the_test():
    model = architectures.make("lfm2")
    prepare(model)
    batch = branches()
    (micro,) = pack(batch, range(5), 1000, Rows.PACKED)
    theirs = torch.cat([alone(model, batch[index]) for index in micro.members])
    assert float((score_actions(model, micro)["logprobs"] - theirs).detach().abs().max()) > 0.01


def test_boundaries_reach_the_layers_that_take_them():
    model = architectures.make("lfm2")
    prepare(model)
    (micro,) = pack(branches(), range(5), 1000, Rows.PACKED)
    seen = []
    for module in model.modules():
        if type(module).__name__ == "Lfm2ShortConv":
            module.register_forward_pre_hook(lambda _m, _a, kwargs: seen.append(kwargs["seq_idx"]), with_kwargs=True)
    score_actions(model, micro)
    lengths = [node.end - node.start for node in micro.layout.nodes]
    assert seen[0].tolist() == [[number for number, length in enumerate(lengths) for _ in range(length)]]


def test_a_head_that_ours_does_not_match_stays_the_models_own(caplog):
    model, like_it = (architectures.make("gemma2") for _ in range(2))
    for one in (model, like_it):
        prepare(one)
        one.get_output_embeddings().shape = head.LogitShape()
    assert check_rows(model, like_it) is Rows.FOLDED
    assert not any(isinstance(one.get_output_embeddings(), head.ScoringHead) for one in (model, like_it))
    assert "output layer" in caplog.text
    batch = branches()
    (micro,) = pack(batch, range(5), 1000)
    theirs = torch.cat([alone(like_it, batch[index]) for index in micro.members])
    torch.testing.assert_close(score_actions(like_it, micro, processed=True)["logprobs"], theirs)


def test_attention_that_ours_does_not_know_stays_the_models_own(caplog, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError("sinks")

    monkeypatch.setattr(attention, "attend", refuse)
    model = architectures.make("llama")
    prepare(model)
    trunk = copy.deepcopy(model.base_model)
    assert check_rows(model, trunk) is Rows.PACKED
    assert model.config._attn_implementation == trunk.config._attn_implementation == "eager"
    assert "sinks" in caplog.text
    monkeypatch.undo()
    attention.use(model)


def test_a_model_that_mixes_the_sequences_of_one_pass_is_refused(monkeypatch):
    right = self_test.score_actions

    def mix(model: torch.nn.Module, micro: MicroBatch) -> Scores:
        scores = right(model, micro)
        return {"logprobs": scores["logprobs"] - len(micro.members) + 1}

    monkeypatch.setattr(self_test, "score_actions", mix)
    model = architectures.make("llama")
    prepare(model)
    with pytest.raises(StartupError, match="llama gives other logprobs than its own forward pass"):
        check_rows(model)


def test_a_model_that_is_right_nowhere_is_refused(monkeypatch):
    monkeypatch.setattr(self_test, "score_actions", lambda _, micro: {"logprobs": torch.zeros(len(micro.actions_K))})
    model = architectures.make("llama")
    prepare(model)
    with pytest.raises(StartupError, match="llama gives other logprobs than its own forward pass"):
        check_rows(model)


def test_a_rank_that_is_lost_meanwhile_is_no_fault_of_the_model(monkeypatch):
    def lose(*_: object, **__: object) -> None:
        raise torch.distributed.DistNetworkError("Connection reset by peer")

    monkeypatch.setattr(self_test, "score_actions", lose)
    model = architectures.make("llama")
    prepare(model)
    with pytest.raises(RankLost), together():
        check_rows(model)
