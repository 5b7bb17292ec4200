"""Which algorithms the configuration names, and what is said about those that it cannot mean."""

from __future__ import annotations

import pytest

from shared.config import ALGORITHMS, TrainerConfig, load_config
from shared.errors import ConfigError
from trainer_service.algorithms.registry import algorithm
from trainer_service.algorithms.seam import Needs
from trainer_service.backends.deepspeed import has_bf16


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ("{algorithm: pp0}", "trainer.algorithm: no algorithm is named 'pp0'; did you mean 'ppo'?"),
        ("{algorithms: {zzz: 1}}", "trainer.algorithms: no algorithm is named 'zzz'; known: ppo, reinforce_pp, "),
        (
            "{algorithms: {ppo: -1}}",
            "trainer.algorithms.ppo=-1: input should be greater than or equal to 0; correct it",
        ),
        ("{algorithms: {sft: 1, ppo: 1, sft: 2}}", "is not YAML at line 2, column 40: sft stands there twice; correct"),
        ("{name: a/../../versions}", "trainer.name='a/../../versions': must be letters, digits and . _ -, b"),
        ("{algorithms: {}}", "trainer.algorithms={} names no algorithm; name some with weights, or remove the key"),
        (
            "{algorithms: {sft: true}}",
            "trainer.algorithms.sft=True is no weight; write a number without quotes, such as 0.2",
        ),
        ("{algorithms: {sft: '1'}}", "trainer.algorithms.sft='1' is no weight; write a number without quotes, such"),
        ("{algorithms: {sft: 1e-1}}", "trainer.algorithms.sft='1e-1' is no weight; write a number without quotes, su"),
        (
            "{algorithm: kto, center_keys: true}",
            "center_keys=true is for algorithms with advantages of rewards, and in use is kto;",
        ),
        (
            "{algorithms: {sft: 1, raft: 1}, center_keys: true}",
            "trainer.center_keys=true is for algorithms with advantages of rewards, and in use is sft, raft; name "
            "one of ppo, reinforce_pp, spo, grpo, rloo, step_grpo, or set it to false",
        ),
        (
            "{algorithm: hint, hint: {comment: null, correction: null, next_message: null}}",
            "trainer.hint: comment, correction and next_message are all null, so that nothing is learnt; give one of "
            "them a wording with {text}",
        ),
        (
            "{algorithm: hint, hint: {comment: null, correction: null}}",
            "trainer.hint.comment and trainer.hint.correction are null, and a next message alone makes no row ready; "
            "set one of them, or name an algorithm besides hint",
        ),
        (
            "{algorithm: hint, rehearse: 1, hint: {comment: null, correction: null}}",
            "trainer.hint.comment and",
        ),
        (
            "{algorithms: {hint: 1, kto: 1}, rehearse: 1, hint: {comment: null, correction: null}}",
            "trainer.rehearse=1: sft and hint alone learn again",
        ),
        (
            "{algorithm: distill, distill: {url: 'localhost:8000'}}",
            "trainer.distill.url is no address; write http://HOST:PORT, without /v1",
        ),
        ("{algorithm: distill, distill: {url: 'http://'}}", "trainer.distill.url is no address; write http"),
        ("{algorithm: distill, distill: {url: 'http://a:b'}}", "trainer.distill.url is no address; write"),
        (
            "{batch_size: 100000000000000000000}",
            "trainer.batch_size=100000000000000000000: input should be less",
        ),
        ("{algorithms: {ppo: .inf}}", "trainer.algorithms.ppo=inf: input should be a finite number; correct it"),
        ("{algorithms: {ppo: 0, sft: 0}}", "all weights are 0; give one a weight above 0"),
        ("{algorithm: ppo, algorithms: {sft: 1}}", "trainer.algorithm and trainer.algorithms are both set; remove one"),
        (
            "{raft: {above: 1}}",
            "trainer.raft is set, and the algorithm in use is ppo; remove the section, or name raft in "
            "trainer.algorithm",
        ),
        ("{algorithms: {ppo: 1, sft: 0}, sft: {}}", "trainer.sft is set, and the algorithm in use is ppo"),
        ("{ppo: {epochs: 2}}", "trainer.ppo.epochs=2: no such key; did you mean 'trainer.epochs'?"),
        ("{ppo: {clp: 2}}", "trainer.ppo.clp=2: no such key; did you mean 'clip'?"),
        ("{ppo: {dual_clip: 1}}", "trainer.ppo.dual_clip=1: input should be greater than 1; correct it"),
        (
            "{algorithm: raft, raft: {above: 1, quantile: 0.9}}",
            "trainer.raft.quantile and trainer.raft.above are both set; remove one of them",
        ),
        (
            "{algorithm: hint, breaker: {kl_to_base: 9}}",
            "trainer.breaker.kl_to_base=9 would not be watched: hint as configured does not load the base model, which "
            "the distance is to; set trainer.hint.kl_coef above 0 or remove the key",
        ),
        (
            "{algorithms: {sft: 1, ppo: 1}, ppo: {kl_coef: 0}, breaker: {kl_to_base: 9}}",
            "would not be watched: sft, ppo as configured does not load the base model, which the distance is to; set "
            "trainer.ppo.kl_coef above 0 or remove the key",
        ),
        (
            "{algorithm: sft, breaker: {kl_to_base: 9}}",
            "which the distance is to; name an algorithm in trainer.algorithms that does or remove the key",
        ),
        ("{algorithm: dpo, dpo: {label_smoothing: 0.5}}", "input should be less than 0.5; correct it"),
        (
            "{algorithm: hint, deepspeed: {zero_optimization: {stage: 3}}}",
            "trainer.hint.teacher=average needs whole weights, and ZeRO 3 parts them; set "
            "trainer.deepspeed.zero_optimization.stage to 2, or trainer.hint.teacher to live",
        ),
        (
            "{algorithm: auto, hint: {teacher: version}, deepspeed: {zero_optimization: {stage: 3}}}",
            "trainer.hint.teacher=version needs whole weights",
        ),
        (
            "{algorithm: grpo, grpo: {mirror_coef: 0.5}}",
            "trainer.grpo.mirror_coef is set, and trainer.grpo.surrogate=clip; it is for opmd alone; remove it",
        ),
        (
            "{algorithms: {hint: 1, ppo: 1}, hint: {mean_tokens: 64}}",
            "trainer.hint.mean_tokens is set, and trainer.hint.mean=tokens; it is for constant alone; remove it",
        ),
        (
            "{algorithm: distill, distill: {path: teacher, key_env: KEY}}",
            "trainer.distill.key_env is set, and trainer.distill.url is not; it is for a server alone; remove it",
        ),
        ("{rehearse: 0.1}", "trainer.rehearse=0.1: sft and hint alone learn again, hint with a top_k"),
        ("{algorithm: hint, rehearse: 1, hint: {top_k: 0}}", "trainer.rehearse=1: sft and hint alone learn"),
        ("{algorithm: hint, rehearse: 4.5}", "rehearse"),
        ("{deepspeed: {bf16: {enabled: true}}}", "trainer.deepspeed.bf16 is not taken; set trainer.precision: bf16"),
        ("{deepspeed: {amp: {enabled: true}}}", "trainer.deepspeed.amp is not taken; set trainer.precision: bf16"),
        ("{deepspeed: {gradient_accumulation_steps: 4}}", "is not taken; set trainer.minibatches and trainer.max_tok"),
        (
            "{deepspeed: {activation_checkpointing: {}}}",
            "activation_checkpointing is not taken; set trainer.grad",
        ),
        ("{deepspeed: {gradient_clipping: 1.0}}", "trainer.deepspeed.gradient_clipping is not taken; set trainer.max_"),
        (
            "{deepspeed: {optimizer: adam}}",
            "trainer.deepspeed.optimizer='adam': must be a section with keys of its own",
        ),
        ("{deepspeed: {optimizer: null}}", "trainer.deepspeed.optimizer=None: must be a section with keys of its own"),
        ("{deepspeed: {optimizer: {params: null}}}", "trainer.deepspeed.optimizer.params=None: must be a section"),
        ("{deepspeed: {optimizer: {type: Muon}}}", "trainer.deepspeed.optimizer.type=Muon: a saved state cannot"),
        ("{deepspeed: {optimizer: {type: NAdam}}}", "trainer.deepspeed.optimizer.type=NAdam: a saved state cannot"),
        ("{deepspeed: {zero_optimization: 3}}", "trainer.deepspeed.zero_optimization=3: must be a section with keys"),
        ("{deepspeed: {zero_optimisation: {stage: 3}}}", "no key of DeepSpeed's; did you mean 'zero_optimization'?"),
        (
            "{deepspeed: {stage: 3}}",
            "trainer.deepspeed.stage belongs under trainer.deepspeed.zero_optimization; move it",
        ),
        ("{deepspeed: {offload_optimizer: {device: cpu}}}", "belongs under trainer.deepspeed.zero_optimization; move"),
        ("{deepspeed: {lr: 1.0e-4}}", "trainer.deepspeed.lr belongs under trainer.deepspeed.optimizer.params; move it"),
        ("{deepspeed: {optimizer: {lr: 1.0e-4}}}", "optimizer.lr belongs under trainer.deepspeed.optimizer.params;"),
        ("{deepspeed: {scheduler: {warmup_num_steps: 9}}}", "belongs under trainer.deepspeed.scheduler.params; move"),
        ("{deepspeed: {optimizer: {typ: SGD}}}", "trainer.deepspeed.optimizer.typ is no key of DeepSpeed's; did you"),
        ("{deepspeed: {foo: 1}}", "trainer.deepspeed.foo is no key of DeepSpeed's; correct or remove it"),
        ("{deepspeed: {bfloat16: {}}}", "trainer.deepspeed.bfloat16 is not taken; set trainer.precision: bf16"),
        ("{warmup_updates: 3, deepspeed: {scheduler: {}}}", "trainer.warmup_updates and trainer.deepspeed.scheduler"),
        (
            "{algorithm: ppo, ppo: {critic_learning_rate: 1e-3}, deepspeed: {scheduler: {}}}",
            "trainer.ppo.critic_learning_rate is set, and trainer.deepspeed.scheduler sets the critic's rate",
        ),
    ],
)
def test_what_cannot_be_meant_is_one_line_with_key_reason_and_remedy(tmp_path, trainer, said):
    file = tmp_path / "flywheel.yaml"
    file.write_text(f"model: {{path: m}}\ntrainer: {trainer}\n")
    with pytest.raises(ConfigError) as error:
        load_config(file, {})
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            {"FLYWHEEL_TRAINER__ALGORITHMS": "{sft: 1, ppo: 1, sft: 2}"},
            "the value of environment variable FLYWHEEL_TRAINER__ALGORITHMS names sft twice; name it once",
        ),
        (
            {"FLYWHEEL_TRAINER__ALGORITHMS__SFT": "1", "FLYWHEEL_TRAINER__ALGORITHMS__sft": "2"},
            "environment variables FLYWHEEL_TRAINER__ALGORITHMS__SFT and FLYWHEEL_TRAINER__ALGORITHMS__sft are the "
            "same setting; unset one of them",
        ),
        ({"FLYWHEEL_TRAINER__ALGORITHMS": "{}"}, "trainer.algorithms={} names no algorithm"),
        ({"FLYWHEEL_TRAINER__ALGORITHMS__SFT": "true"}, "trainer.algorithms.sft=True is no weight"),
        (
            {"FLYWHEEL_TRAINER": "{algorithm: ppo}", "FLYWHEEL_TRAINER__SEED": "x"},
            "environment variable FLYWHEEL_TRAINER__SEED: trainer.seed='x'",
        ),
        ({"FLYWHEEL_TRAINER__ALGORITHMS": "{sft: 1"}, "FLYWHEEL_TRAINER__ALGORITHMS is not YAML; quote it"),
    ],
)
def test_what_the_environment_cannot_mean_is_one_line_with_the_variable_reason_and_remedy(tmp_path, environ, said):
    file = tmp_path / "flywheel.yaml"
    file.write_text("model: {path: m}\n")
    with pytest.raises(ConfigError) as error:
        load_config(file, environ)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_hint_learns_from_the_kinds_of_signals_that_it_has_a_wording_for():
    mixed = {"hint": 1.0, "kto": 1.0}
    assert TrainerConfig(algorithms=mixed).learns_from == {"comment", "correction", "rating"}
    for null in ("comment", "correction"):
        config = TrainerConfig.model_validate({"algorithms": mixed, "hint": {null: None}})
        assert config.learns_from == {"comment", "correction", "rating"} - {null}
        assert config.learns_again == {"comment", "correction"} - {null}
    neither = {"comment": None, "correction": None}
    assert TrainerConfig.model_validate({"algorithms": mixed, "hint": neither}).learns_from == {"rating"}


@pytest.mark.parametrize("algorithm", ["auto", "ppo", "reinforce_pp", "spo", "grpo", "rloo", "step_grpo"])
def test_keys_are_centred_for_algorithms_with_advantages_of_rewards(algorithm):
    assert TrainerConfig(algorithm=algorithm, center_keys=True).center_keys
    assert TrainerConfig(algorithms={"sft": 1, "reinforce_pp": 1}, center_keys=True).center_keys


def test_one_algorithm_is_a_mix_of_one():
    assert TrainerConfig().parts == {"ppo": 1.0}
    assert TrainerConfig(algorithm="sft").parts == {"sft": 1.0}


def test_an_algorithm_of_weight_zero_is_not_used():
    config = TrainerConfig(algorithms={"reinforce_pp": 1.0, "sft": 0.2, "ppo": 0})
    assert config.parts == {"reinforce_pp": 1.0, "sft": 0.2}


def test_a_mix_learns_from_the_signals_of_any_of_its_algorithms():
    assert TrainerConfig().learns_from == {"reward", "rating", "metric"}
    mixed = TrainerConfig(algorithms={"reinforce_pp": 1.0, "sft": 0.2})
    assert mixed.learns_from == {"reward", "rating", "metric", "correction", "demonstration"}


@pytest.mark.parametrize("emulated", [True, False])
def test_a_gpu_that_only_emulates_bfloat16_has_none(emulated, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(
        "torch.cuda.is_bf16_supported", lambda including_emulation=True: including_emulation or not emulated
    )
    assert has_bf16() is not emulated


@pytest.mark.parametrize(
    "trainer",
    [
        {"algorithm": "ppo"}, {"algorithm": "hint", "hint": {"kl_coef": 0.01}}, {"algorithms": {"sft": 1, "dpo": 1}},
        {"algorithm": "kto"}, {"algorithm": "auto"},
    ],
)  # fmt: skip
def test_a_bound_on_the_distance_to_the_base_is_taken_where_the_base_is_loaded(trainer):
    config = TrainerConfig.model_validate({**trainer, "breaker": {"kl_to_base": 9}})
    assert config.breaker.kl_to_base == 9
    assert TrainerConfig.model_validate({"algorithm": "sft", "breaker": {"kl_to_base": None}})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_configuration_knows_which_algorithms_load_the_base_model(name):
    teacher = {"path": "teacher"} if name == "distill" else {}
    has_penalty = "kl_coef" in ALGORITHMS[name].model_fields
    for section in [teacher, *([{**teacher, "kl_coef": coef} for coef in (0.0, 0.1)] if has_penalty else [])]:
        config = TrainerConfig.model_validate({"algorithm": name, name: section})
        assert config.settings_of(name).loads_base == (Needs.REFERENCE in algorithm(name, config).needs)
