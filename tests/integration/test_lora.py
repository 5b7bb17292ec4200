"""Versions that are adapters: what is trained, what is published, and what goes on after a stop."""

from __future__ import annotations

import contextlib
import json
from itertools import product
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from services.trainer import build_update
from shared.errors import FlywheelError, StartupError
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.probe import ProbeSequence
from shared.versions import verify_version, version_path
from tests.support.experiences import make_experiences, trainer_config
from tests.support.forms import FULL
from tests.support.models import make_tiny_model, publish_base
from trainer_service.adapters import CRITIC, Adapters
from trainer_service.base_version import ensure_base_version
from trainer_service.learner import Learner
from trainer_service.models import load_causal_lm
from trainer_service.publish import as_published, compute_probe
from trainer_service.ranks import join_ranks
from trainer_service.resume import StateStore

ALGORITHMS = {
    "ppo": {},
    "reinforce_pp": {"algorithm": "reinforce_pp"},
    "raft": {"algorithm": "raft", "raft": {"above": 0.5}},
}
EVERYTHING_PARTITIONED = {"stage3_param_persistence_threshold": 0}
ADAM = {"optimizer": {"params": {"eps": 1e-6}}}  # Adam divides a gradient by its size: rounding shall be no gradient
ALL = list(product(ALGORITHMS, [1, 2, 3]))
SOME = [("ppo", 3), ("reinforce_pp", 2), ("raft", 1)]
LORA = {"rank": 8, "alpha": 16}
# the first of these are the short form
PROBED = [(0, "float32"), (3, "bfloat16"), (3, "float32"), (2, "bfloat16")]
SAVED = [(3, "bf16"), (3, "float32"), (1, "bf16")]


@pytest.fixture(scope="module")
def rows(model):
    return make_experiences(model, 12)


@contextlib.contextmanager
def learner_of(root: Path, model: Path, stage: int = 0, lora: dict[str, object] = LORA, start: int = 0, **trainer):
    zero = {"zero_optimization": {"stage": stage, **EVERYTHING_PARTITIONED}}
    config = trainer_config(root, model, lora, epochs=1, deepspeed={**ADAM, **zero}, **trainer)
    publish_base(config)
    ranks = join_ranks(60)
    with contextlib.closing(StateStore(config.root, "trainer")) as states:
        yield Learner(lambda: build_update(config, config.root / version_path(start), ranks), ranks, states)


def train(learner: Learner, rows, *batches: int) -> None:
    for number in batches:
        learner.train(rows[4 * number : 4 * number + 4], step=number, version=0, ahead=0)


def everything(learner: Learner) -> dict[str, torch.Tensor]:
    """Master weights and moments."""
    state, parameters = learner.backend.state, learner.backend.trained_parameters()
    kinds = [None, *state.moments()]
    return {f"{name} {kind}": state.read(p, kind).clone() for name, p in parameters.items() for kind in kinds}


def publish(root: Path, learner: Learner, version: int = 1) -> Path:
    learner.write_version(root, version=version, parent=version - 1, step=version)
    return root / version_path(version)


def by_peft(root: Path, folder: Path, sequences: list[ProbeSequence]) -> list[list[float]]:
    """The logprobs of an adapter's folder as PEFT computes them, over version 0 in float32."""
    base = AutoModelForCausalLM.from_pretrained(root / version_path(0), dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=True)
    return [one.logprobs for one in compute_probe(adapted, [sequence.token_ids for sequence in sequences])]


def largest_gap(found: list[list[float]], expected: list[ProbeSequence]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(abs(a - b) for own, other in pairs for a, b in zip(own, other.logprobs, strict=True))


@pytest.fixture(scope="module", params=ALGORITHMS)
def plain(request, tmp_path_factory, model, rows):
    """An algorithm, and what two updates with it end with."""
    with learner_of(tmp_path_factory.mktemp("plain"), model, **ALGORITHMS[request.param]) as learner:
        train(learner, rows, 0, 1)
        return request.param, everything(learner)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_zero_stage_ends_with_the_same_adapters(stage, tmp_path, model, rows, plain):
    name, expected = plain
    if (name, stage) not in (ALL if FULL else SOME):
        pytest.skip("in the long form")
    with learner_of(tmp_path, model, stage, **ALGORITHMS[name]) as learner:
        train(learner, rows, 0, 1)
        found = everything(learner)
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], tensor, atol=2e-5) for name, tensor in expected.items())


def test_nothing_but_adapters_and_the_critics_head_is_trained_and_the_base_stays(plain, tmp_path, model, rows):
    name, trained = plain
    critic = {key for key in trained if f".{CRITIC}." in key or "value_head" in key}
    assert all(".lora_" in key or "value_head" in key for key in trained)
    assert bool(critic) == (name == "ppo")
    with learner_of(tmp_path, model, **ALGORITHMS[name]) as learner:
        base = {key: p.clone() for key, p in learner.policy.named_parameters() if not p.requires_grad}
        train(learner, rows, 0)
        assert base
        assert all(torch.equal(learner.policy.get_parameter(key), tensor) for key, tensor in base.items())


def test_layers_that_are_computed_again_use_the_adapter_that_they_were_computed_with(tmp_path, model, rows):
    ends = []
    for checkpointing in (False, True):
        with learner_of(tmp_path / str(checkpointing), model, gradient_checkpointing=checkpointing) as learner:
            train(learner, rows, 0, 1)
            ends.append(everything(learner))
    assert all(torch.equal(ends[1][name], tensor) for name, tensor in ends[0].items())


@pytest.mark.parametrize(("stage", "dtype"), PROBED if FULL else PROBED[:2])
def test_an_adapter_s_probe_is_what_peft_computes_from_its_folder(stage, dtype, tmp_path):
    model = make_tiny_model(tmp_path / "base", dtype=dtype)
    with learner_of(tmp_path, model, stage) as learner:
        train(learner, make_experiences(model, 8), 0, 1)
        folder = publish(tmp_path, learner)
    probe = verify_version(folder).probe
    assert largest_gap(by_peft(tmp_path, folder, probe.sequences), probe.sequences) < 5e-5
    base = AutoModelForCausalLM.from_pretrained(tmp_path / version_path(0), dtype=torch.float32)
    alone = compute_probe(base, [sequence.token_ids for sequence in probe.base])
    assert largest_gap([one.logprobs for one in alone], probe.base) < 5e-5
    assert probe.distinct
    assert {tensor.dtype for tensor in load_file(folder / "adapter_model.safetensors").values()} == {
        getattr(torch, dtype)
    }


def test_a_probe_is_where_adapter_and_base_differ_most(tmp_path, model, rows):
    with learner_of(tmp_path, model) as learner:
        train(learner, rows, 0, 1)
        probe = verify_version(publish(tmp_path, learner)).probe
        others = compute_probe(
            learner.policy, [one.token_ids for one in verify_version(tmp_path / version_path(0)).probe.sequences]
        )
        with Adapters(learner.policy).use(None):
            base = compute_probe(learner.policy, [one.token_ids for one in others])
    gaps = [largest_gap([own.logprobs], [other]) for own, other in zip(probe.sequences, probe.base, strict=True)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] >= max(largest_gap([own.logprobs], [other]) for own, other in zip(others, base, strict=True))


def test_an_adapter_that_changes_nothing_yet_says_so(tmp_path, model):
    with learner_of(tmp_path, model) as learner:
        manifest = verify_version(publish(tmp_path, learner))
    assert not manifest.probe.distinct
    assert [one.logprobs for one in manifest.probe.sequences] == [one.logprobs for one in manifest.probe.base]
    assert manifest.base_version == 0 and manifest.kind == "lora"


def test_the_reference_is_the_base_however_far_the_policy_is(tmp_path, model, rows):
    with learner_of(tmp_path, model) as learner:
        train(learner, rows, 0, 1)
        (micro,) = learner._update._packer.pack(_sequences(rows[:1]), [0])
        seen = learner._update._precompute._reference(micro)["logprobs"]
        policy = learner.backend(micro)["logprobs"]
    plain = load_causal_lm(tmp_path / version_path(0))
    ids = micro.input_ids_1T
    with torch.no_grad():
        expected = plain(input_ids=ids).logits[0, micro.keep_K].log_softmax(-1)
    expected_K = expected.gather(-1, micro.actions_K[:, None])[:, 0]
    assert torch.allclose(seen, expected_K, atol=1e-5)
    assert not torch.allclose(policy, expected_K, atol=1e-3)


def _sequences(rows):
    from tests.support.batches import rows_batch

    return rows_batch(rows).sequences


@pytest.mark.parametrize(("stage", "precision"), SAVED if FULL else SAVED[:1])
def test_a_trainer_of_adapters_goes_on_with_the_same_bits_from_a_small_state(stage, precision, tmp_path, model, rows):
    with learner_of(tmp_path, model, stage, precision=precision) as learner:
        train(learner, rows, 0, 1)
        saved = learner.save(1)
        trained = learner.trained_bytes
        train(learner, rows, 2)
        expected = everything(learner)
    with learner_of(tmp_path, model, stage, precision=precision) as learner:
        learner.load(saved)
        train(learner, rows, 2)
        found = everything(learner)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    size = sum(file.stat().st_size for file in (tmp_path / saved.path).iterdir())
    assert size < 3 * trained + 65_536, "weights and two moments, and none of the base"


def test_without_a_state_it_begins_with_the_adapter_of_a_version(tmp_path, model, rows):
    with learner_of(tmp_path, model) as learner:
        train(learner, rows, 0, 1)
        folder = publish(tmp_path, learner)
    with learner_of(tmp_path, model, start=1) as learner:
        written = load_file(folder / "adapter_model.safetensors")
        read = learner.weights()
        assert all(torch.equal(read(name), tensor) for name, tensor in written.items())


def begin_other(root: Path, model: Path, lora: dict[str, object]) -> str:
    """What a start over version 1 with other settings is refused with."""
    with pytest.raises(StartupError) as caught, learner_of(root, model, lora=lora, start=1):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_another_adapter_than_the_version_s_is_refused_in_one_line(tmp_path, model):
    with learner_of(tmp_path, model) as learner:
        folder = publish(tmp_path, learner)
    rank = begin_other(tmp_path, model, {**LORA, "rank": 4})
    assert "rank 8, alpha 16 and targets down_proj" in rank and "makes rank 4" in rank
    assert "makes rank 8, alpha 32" in begin_other(tmp_path, model, {"rank": 8})
    assert "and q_proj, v_proj; set these" in begin_other(tmp_path, model, {**LORA, "targets": ["v_proj", "q_proj"]})
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(dict(list(tensors.items())[1:]), folder / "adapter_model.safetensors")
    assert "set these" in begin_other(tmp_path, model, LORA)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["q_proj", "z_proj"], "'z_proj' is no linear layer of the model"),
        (["nothing"], "nothing"),
        (["input_layernorm"], "input_layernorm"),
    ],
)
def test_targets_that_are_none_are_refused_in_one_line(targets, expected, tmp_path, model):
    with pytest.raises(StartupError) as caught, learner_of(tmp_path, model, lora={"targets": targets}):
        pass
    assert expected in str(caught.value) and "\n" not in str(caught.value) and "model.lora.targets" in str(caught.value)


def test_targets_of_the_same_end_elsewhere_are_named_whole(tmp_path, model, rows):
    target = "layers.1.self_attn.q_proj"
    with learner_of(tmp_path, model, lora={**LORA, "targets": [target]}) as learner:
        train(learner, rows, 0)
        folder = publish(tmp_path, learner)
    assert json.loads((folder / "adapter_config.json").read_text())["target_modules"] == [f"model.{target}"]
    probe = verify_version(folder).probe
    assert largest_gap(by_peft(tmp_path, folder, probe.sequences), probe.sequences) < 5e-5


def refused_start(root: Path, model: Path, lora: dict[str, object] | None) -> str:
    config = trainer_config(root, model, lora)
    with (
        contextlib.closing(Ledger.open(config.ledger_url)) as ledger,
        pytest.raises(FlywheelError) as caught,
    ):
        ensure_base_version(config, ledger)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_another_kind_rank_or_alpha_than_before_is_refused_before_anything_is_loaded(tmp_path, model):
    with learner_of(tmp_path, model) as learner:
        manifest = learner.write_version(tmp_path, version=1, parent=0, step=1)
    with contextlib.closing(Ledger.open(trainer_config(tmp_path, model).ledger_url)) as ledger:
        with ledger.write() as connection:
            about = {"kind": "lora", "step": 1, **as_published(tmp_path, manifest)}
            transitions.publish(connection, version=1, parent=0, **about)
        ensure_base_version(trainer_config(tmp_path, model, LORA), ledger)
    assert "model.kind=full, and v000001 of the ledger" in (line := refused_start(tmp_path, model, None))
    assert "set model.kind: lora, or begin with a new root_dir and database" in line
    assert "model.lora.rank=16, and" in refused_start(tmp_path, model, {"alpha": 16})
    assert "trained with 16; set model.lora.alpha: 16" in refused_start(tmp_path, model, {"rank": 8})
