"""One update under real DeepSpeed: the same weights whatever the ZeRO stage and however the batch is cut."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from services.trainer import build_update
from tests.support.batches import rows_batch
from tests.support.experiences import make_experiences, trainer_config
from tests.support.forms import FULL
from tests.support.models import make_tiny_model, publish_base
from trainer_service.algorithms.seam import Needs, Unit, Words
from trainer_service.models import named_weights
from trainer_service.parts import Part
from trainer_service.ranks import join_ranks
from trainer_service.update import Updater, _stats


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def rows(base):
    """Of two in three something was said in words."""
    made = make_experiences(base, 16)
    return [replace(row, hint=np.array([1, 6, 10 + row.id, 2], np.int32)) if row.id % 3 else row for row in made]


ALGORITHMS = {
    "ppo": {},
    "reinforce_pp": {"algorithm": "reinforce_pp"},
    "raft": {"algorithm": "raft", "raft": {"above": 0.5}},
    "hint": {"algorithm": "hint", "hint": {"neutral_reward": None, "teacher": "live", "kl_coef": 0.01}},
    "mix": {"algorithms": {"ppo": 1.0, "reinforce_pp": 0.5, "raft": 0.2}, "raft": {"above": 0.5}},
}


def build(root: Path, base: Path, **trainer):
    """An updater and the policy inside it, with version 0 published."""
    config = trainer_config(root, base, **trainer)
    version_0 = publish_base(config)
    torch.manual_seed(0)
    return build_update(config, version_0, join_ranks(60))


def weights_of(update, policy) -> dict[str, torch.Tensor]:
    return {name: update.backend.whole(tensor).clone() for name, tensor in named_weights(policy).items()}


def train(root: Path, base: Path, rows, **trainer) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Two updates; the weights they end with, and the second's figures.

    Adam divides a gradient by its size. Its ε is larger here, so that rounding is no gradient.
    """
    trainer["deepspeed"] = {"optimizer": {"params": {"eps": 1e-6}}, **trainer.get("deepspeed", {})}
    update, policy = build(root, base, **trainer)
    update.update(rows_batch(rows[:8]), step=0, version=0)
    stats = update.update(rows_batch(rows[8:]), step=1, version=0, ahead=1)
    return weights_of(update, policy), stats


def in_the_long_form(name: str, everywhere: bool) -> None:
    """CI runs the first algorithm in all ways, and each of the others in one."""
    if not (FULL or everywhere or name == "ppo"):
        pytest.skip("in the long form")


@pytest.fixture(scope="module", params=ALGORITHMS)
def plain(request, tmp_path_factory, base, rows):
    """The settings of an algorithm, and what they end with."""
    settings = ALGORITHMS[request.param]
    return request.param, settings, *train(tmp_path_factory.mktemp("plain"), base, rows, **settings)


def assert_same(got, expected, tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(got[name].float(), tensor.float(), atol=tolerance), name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_zero_stage_ends_with_the_same_weights(stage, tmp_path, base, rows, plain):
    name, settings, expected, figures = plain
    in_the_long_form(name, everywhere=stage == 3)
    weights, stats = train(tmp_path, base, rows, deepspeed={"zero_optimization": {"stage": stage}}, **settings)
    assert_same(weights, expected, 2e-5)
    assert stats["grad_norm"] == pytest.approx(figures["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("budget", [1, 40])
def test_how_a_batch_is_packed_changes_nothing(budget, tmp_path, base, rows, plain):
    name, settings, expected, figures = plain
    in_the_long_form(name, everywhere=budget == 40)
    weights, stats = train(tmp_path, base, rows, max_tokens_per_micro_batch=budget, **settings)
    assert_same(weights, expected, 2e-5)
    assert stats == pytest.approx({**figures, "seconds": stats["seconds"]}, rel=1e-3, abs=1e-5)


def test_a_batch_trained_again_gives_the_same_bits(tmp_path, base, rows, plain):
    _, settings, expected, _ = plain
    weights, _ = train(tmp_path, base, rows, **settings)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_only_the_models_that_an_algorithm_needs_are_built(tmp_path, base):
    for number, (name, has_critic, has_reference) in enumerate(
        [("ppo", True, True), ("reinforce_pp", False, True), ("sft", False, False), ("dpo", False, True)]
    ):
        update, _ = build(tmp_path / str(number), base, algorithm=name)
        critic = [key for key, _ in update.backend.module.named_parameters() if not key.startswith("policy.")]
        assert bool(critic) == has_critic
        assert (update._precompute._reference is not None) == has_reference
    update, _ = build(tmp_path / "free", base, algorithm="reinforce_pp", reinforce_pp={"kl_coef": 0.0})
    assert update._precompute._reference is None


def test_a_part_without_rows_holds_nobody_up(tmp_path, base, rows):
    alone, _ = train(tmp_path / "alone", base, rows, algorithms={"reinforce_pp": 1.0})
    mixed, stats = train(
        tmp_path / "mixed", base, rows, algorithms={"reinforce_pp": 1.0, "raft": 5.0}, raft={"above": 1e6}
    )
    assert_same(mixed, alone, 0)
    assert not any(name.startswith("raft/") for name in stats)


def test_a_batch_that_nobody_learns_from_changes_nothing(tmp_path, base, rows):
    update, policy = build(tmp_path, base, algorithm="raft", raft={"above": 1e6})
    before = weights_of(update, policy)
    stats = update.update(rows_batch(rows), step=0, version=0)
    assert_same(weights_of(update, policy), before, 0)
    assert stats["grad_norm"] == 0


def test_a_mix_is_the_weighted_sum_of_its_parts(tmp_path, base, rows):
    """Plain gradient descent of one step: the mix moves the weights by the weighted sum of what each alone would."""
    descent = {
        "epochs": 1,
        "minibatches": 1,
        "max_grad_norm": 1e9,
        "deepspeed": {"optimizer": {"type": "SGD"}},
        "learning_rate": 0.1,
    }

    def moved(name: str, **settings) -> dict[str, torch.Tensor]:
        update, policy = build(tmp_path / name, base, **descent, **settings)
        before = weights_of(update, policy)
        update.update(rows_batch(rows), step=0, version=0)
        return {key: tensor - before[key] for key, tensor in weights_of(update, policy).items()}

    first, second = (
        moved("reinforce_pp", algorithm="reinforce_pp"),
        moved("raft", algorithm="raft", raft={"above": 0.5}),
    )
    both = moved("both", algorithms={"reinforce_pp": 0.7, "raft": 0.3}, raft={"above": 0.5})
    assert max(float(tensor.abs().max()) for tensor in both.values()) > 1e-4
    assert_same(both, {key: 0.7 * first[key] + 0.3 * second[key] for key in first}, 1e-6)


def test_rewards_that_are_centred_by_key_are_remembered_and_shown_as_they_were_given(tmp_path, base, rows):
    update, _ = build(tmp_path, base, algorithm="reinforce_pp", center_keys=True)
    stats = update.update(rows_batch(rows), step=0, version=0)
    given = float(np.mean([row.reward for row in rows]))
    assert stats["reward_mean"] == pytest.approx(given)
    remembered = update.memory["keys"]["all"]
    assert remembered["sequences"] == len(rows) and remembered["mean"] == pytest.approx(given)


def test_the_first_step_begins_at_the_policy_that_sampled(tmp_path, base, rows):
    """Each input of the loss under its own name: log π_prox in the ratio, whitened advantages in the surrogate."""
    settings = {"kl_coef": 0.0, "lam": 1.0, "normalize_returns": False}
    update, _ = build(tmp_path, base, epochs=1, minibatches=1, ppo=settings)
    stats = update.update(rows_batch(rows), step=0, version=0)
    rewards = np.repeat([row.reward for row in rows], [len(row.tokens.reply_ids) for row in rows])
    assert stats["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert stats["clip_fraction"] == 0
    assert stats["importance_weight"] == pytest.approx(1, abs=1e-4)
    assert stats["policy_loss"] == pytest.approx(0, abs=1e-4)
    assert stats["value_loss"] == pytest.approx(0.5 * np.square(rewards).mean(), rel=1e-4), "values begin at 0"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_huge_reward_leaves_the_policy_its_whole_gradient(stage, tmp_path, base, rows):
    """Adam with a huge ε and as large a rate moves the weights by the clipped gradient itself."""
    plain_steps = {"params": {"betas": [0.0, 0.0], "eps": 1e6}}
    deepspeed = {"optimizer": plain_steps, "zero_optimization": {"stage": stage}}
    unguarded = {"return_clip": 1e6, "outlier_bound": None, "normalize_returns": False}
    once = {"epochs": 1, "minibatches": 1, "ppo": unguarded}
    update, policy = build(tmp_path, base, learning_rate=1e6, deepspeed=deepspeed, **once)

    def weights() -> torch.Tensor:
        return torch.cat([update.backend.whole(parameter).flatten().clone() for parameter in policy.parameters()])

    before = weights()
    stats = update.update(rows_batch([replace(rows[0], reward=1e6), *rows[1:8]]), step=0, version=0)
    assert stats["grad_norm"] > 1e4, "the critic's"
    assert float((weights() - before).norm()) == pytest.approx(1.0, rel=1e-2), "the policy's, clipped to 1"


def test_staleness_is_counted_from_the_last_version_also_when_several_updates_make_one(tmp_path, base, rows):
    update, _ = build(tmp_path, base)
    batch = rows_batch(replace(row, version=version) for row, version in zip(rows[:2], (4, 7), strict=True))
    stats = update.update(batch, step=0, version=7, ahead=3)
    assert stats["staleness_versions"] == 1.5
    assert "logprob_gap_max" not in stats, "the weights are no version's"
    stats = update.update(batch, step=1, version=5)
    assert stats["staleness_versions"] == 0.5, "the newer version was withdrawn after a crash"


def test_a_token_that_rounding_puts_outside_of_the_cut_is_counted_and_left_out_of_the_gap(base, rows):
    batch = rows_batch(rows[:4])
    processed = [sequence.behaviour.copy() for sequence in batch.sequences]
    processed[1][-1] = -np.inf
    stats = _stats(batch, processed, set(range(4)), version=0, ahead=0)
    assert (stats["logprob_gap_mean"], stats["outside_cut"]) == (0, pytest.approx(1 / stats["tokens"]))


def test_a_row_that_crossed_a_reload_says_nothing_of_the_gap_to_the_engine(tmp_path, base, rows):
    update, _ = build(tmp_path, base, learning_rate=1e-6)
    tokens = replace(rows[0].tokens, logprobs=rows[0].tokens.logprobs - 0.5)
    crossed, whole = (replace(rows[0], tokens=tokens, version_end=end) for end in (1, 0))
    for together, gap in (([crossed, rows[1]], 0.0), ([whole, rows[1]], 0.5), ([crossed], None)):
        stats = update.update(rows_batch(together), step=0, version=0)
        assert stats.get("logprob_gap_max") == pytest.approx(gap, abs=0.01)
    assert not {"logprob_gap_mean", "outside_cut"} & stats.keys(), "what was not measured is absent, not 0"


@pytest.mark.parametrize("stage", [0, 2, 3] if FULL else [0, 3])
def test_the_learning_rates_are_the_configurations(stage, tmp_path, base, rows):
    """The policy's may stand in DeepSpeed's section, and the critic's follows it; warming up it rises step by step."""
    zero = {"zero_optimization": {"stage": stage}}

    def rates(name: str, updates: int = 1, **trainer) -> list[float]:
        update, _ = build(tmp_path / name, base, **trainer)
        for step in range(updates):
            update.update(rows_batch(rows[:2]), step=step, version=0)
        return [group["lr"] for group in update.backend._engine.optimizer.param_groups]

    theirs = {**zero, "optimizer": {"params": {"lr": 5e-4}}}
    assert rates("theirs", deepspeed=theirs) == pytest.approx([5e-4, 5e-3])
    assert rates("warm", 2, deepspeed=zero, warmup_updates=8) == pytest.approx([2.5e-4, 2.5e-3])
    if FULL or not stage:
        assert rates("ours", deepspeed=zero) == pytest.approx([1e-3, 1e-2])
        assert rates("critic", deepspeed=zero, ppo={"critic_learning_rate": 7e-4}) == pytest.approx([1e-3, 7e-4])


def test_another_optimizer_gets_none_of_adams_settings(tmp_path, base, rows):
    train(tmp_path, base, rows, deepspeed={"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}})


def test_dropout_is_off_in_training(tmp_path, base, rows):
    """With it the first step would not begin at the policy that was precomputed."""
    settings = json.loads((base / "config.json").read_text())
    copied = tmp_path / "base"
    shutil.copytree(base, copied)
    (copied / "config.json").write_text(json.dumps({**settings, "attention_dropout": 0.5}))
    update, _ = build(tmp_path / "root", copied, epochs=1, minibatches=1)
    stats = update.update(rows_batch(rows), step=0, version=0)
    assert stats["approx_kl"] == pytest.approx(0, abs=1e-6)


class Hinted:
    """As `hint` would be: it needs a teacher that has read the hint of each sequence, and trains nothing."""

    needs = Needs.TEACHER

    def units(self, batch):
        words = [Words(np.array([5, 6, 7 + place]), np.arange(1, 4)) for place in range(3)]
        return [Unit((place,), (said,), trained=False) for place, said in enumerate(words)]

    def constants(self, batch, units, precomputed, memory):
        memory["teacher"] = precomputed.teacher
        return {}, {}


def test_a_teacher_scores_the_actions_that_words_are_about_behind_them(tmp_path, base, rows):
    update, policy = build(tmp_path, base)
    batch = rows_batch(rows[:4])
    hinting = Updater(update.backend, None, {"hint": Part(Hinted())}, trainer_config(tmp_path, base).trainer)
    hinting.update(batch, step=0, version=0)
    for place, got in enumerate(hinting.memory["hint"]["teacher"]):
        sequence = batch.sequences[place]
        ids = torch.from_numpy(np.concatenate([[5, 6, 7 + place], sequence.token_ids]))
        with torch.no_grad():
            logprobs = policy(input_ids=ids[None]).logits[0].log_softmax(-1)
        expected = logprobs[3 + sequence.actions - 1, sequence.token_actions][1:4]
        np.testing.assert_allclose(got, expected.numpy(), atol=1e-5)
