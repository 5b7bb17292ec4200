"""Models whose files hold their weights in other pieces than memory does: experts of a mixture, one by one."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.trainer import build_update
from shared.ledger.connect import Ledger
from shared.versions import version_path
from tests.support import architectures
from tests.support.experiences import make_experiences, trainer_config
from tests.support.models import make_tiny_model
from trainer_service.base_version import ensure_base_version
from trainer_service.learner import Learner
from trainer_service.ranks import join_ranks


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "first", "stage"), [("qwen3_moe", "gate_proj", 0), ("mixtral", "w1", 3)])
def test_a_version_holds_each_expert_by_the_name_that_the_base_model_has_for_it(name, first, stage, tmp_path):
    base = make_tiny_model(tmp_path / "base")
    architectures.make(name, vocabulary=208).save_pretrained(base)
    config, ranks = trainer_config(tmp_path, base, **_settings(stage)), join_ranks(60)
    with closing(Ledger.open(config.ledger_url)) as ledger:
        ensure_base_version(config, ledger)
    with closing(Learner(lambda: build_update(config, config.root / version_path(0), ranks), ranks)) as learner:
        learner.train(make_experiences(base, 8), step=0, version=0)
        learner.write_version(config.root, version=1, parent=0, step=1)
        fused, backend = learner.policy.model.layers[0].mlp.experts, learner.backend
        gate_up, down = backend.whole(fused.gate_up_proj).clone(), backend.whole(fused.down_proj).clone()
    before, after = (load_file(config.root / version_path(version) / "model.safetensors") for version in (0, 1))
    assert before.keys() == after.keys() and any(not torch.equal(before[one], after[one]) for one in before)
    (folder,) = (key.rpartition(".0.")[0] for key in after if "layers.0." in key and key.endswith(f".0.{first}.weight"))
    second, last = {"gate_proj": ("up_proj", "down_proj"), "w1": ("w3", "w2")}[first]
    for number in range(4):
        own = {one: after[f"{folder}.{number}.{one}.weight"] for one in (first, second, last)}
        assert torch.equal(torch.cat([own[first], own[second]]), gate_up[number])
        assert torch.equal(own[last], down[number])
    _require_loads(config.root / version_path(1), gate_up)


def _settings(stage: int) -> dict[str, object]:
    return {
        "algorithm": "reinforce_pp",
        "reinforce_pp": {"kl_coef": 0.0},
        "deepspeed": {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}},
    }


def _require_loads(folder: Path, gate_up: torch.Tensor) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(loaded.model.layers[0].mlp.experts.gate_up_proj, gate_up)
