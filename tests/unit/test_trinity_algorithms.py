"""Trinity's algorithms, surrogates and KL terms by ours."""

from __future__ import annotations

import pytest

from services.trinity.algorithms import TRINITY, TRL
from shared.config import ALGORITHMS
from tests.support.trinity_files import converted
from tests.support.trinity_page import tables


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_all_of_trinity_s_algorithms_are_known_and_ours_exist():
    assert len(TRINITY) == 24
    for found in [*TRINITY.values(), *TRL.values()]:
        assert found.ours in ALGORITHMS if found.ours else found.note


@pytest.mark.parametrize("theirs", TRINITY)
def test_an_algorithm_without_a_counterpart_is_reported_and_others_are_converted(theirs):
    done = converted(f"model: {{model_path: /m}}\nalgorithm: {{algorithm_type: {theirs}}}")
    (line,) = [line for line in done.lines if line.key == "algorithm.algorithm_type"]
    if TRINITY[theirs].ours:
        assert done.settings["trainer.algorithm"] == TRINITY[theirs].ours and not line.changes_training
    else:
        assert "trainer.algorithm" not in done.settings and line.changes_training


def test_a_surrogate_is_taken_over_with_trinity_s_defaults_where_none_are_given():
    text = "model: {{model_path: /m}}\nalgorithm: {{algorithm_type: gspo, policy_loss_fn: gspo{}}}"
    done = converted(text.format(""))
    ours = {path: value for path, value in done.settings.items() if path.startswith("trainer.grpo.")}
    expected = {"surrogate": "gspo", "clip": 3e-4, "clip_high": 4e-4}
    assert expected.items() <= {path.rpartition(".")[2]: value for path, value in ours.items()}.items()
    assert "trainer.grpo.mean" not in done.settings, "Trinity replaces the mode of the loss by token-mean, our default"
    args = "{clip_range_high: 0.1, loss_agg_mode: seq-mean-token-mean}, loss_agg_mode: token-mean"
    done = converted(text.format(f", policy_loss_fn_args: {args}"))
    assert (done.settings["trainer.grpo.clip_high"], done.settings["trainer.grpo.mean"]) == (0.1, "tokens")
    assert not done.lost


@pytest.mark.parametrize(
    ("loss", "ours"), [("k2", "k2"), ("k3", "k3"), ("low_var_kl", "k3"), ("k1", None), ("abs", None)]
)
def test_kl_in_the_loss_is_taken_over_but_for_estimators_that_have_no_use_there(loss, ours):
    algorithm = f"{{algorithm_type: ppo, kl_loss_fn: {loss}, kl_loss_fn_args: {{kl_coef: 0.05}}}}"
    done = converted("model: {model_path: /m}\nalgorithm: " + algorithm)
    kl = {name: done.settings[f"trainer.ppo.{name}"] for name in ("kl_coef", "kl", "kl_in")}
    assert kl == {"kl_coef": 0.05, "kl": ours or "k2", "kl_in": "loss"}
    assert [line.key for line in done.lost] == ([] if ours else ["algorithm.kl_loss_fn"])


def test_a_kl_penalty_in_the_reward_counts_before_one_in_the_loss():
    algorithm = "{algorithm_type: ppo, kl_penalty_fn: k1, kl_penalty_fn_args: {kl_coef: 0.1}, kl_loss_fn: none}"
    done = converted("model: {model_path: /m}\nalgorithm: " + algorithm)
    kl = {name: done.settings[f"trainer.ppo.{name}"] for name in ("kl_coef", "kl", "kl_in")}
    assert kl == {"kl_coef": 0.1, "kl": "k1", "kl_in": "reward"} and not done.lost


@pytest.mark.parametrize(
    ("penalty", "ours"),
    [("k1", "k1"), ("k2", "k2"), ("k3", "k3"), ("low_var_kl", "k3"), ("corrected_k3", "k3"), ("abs", None)],
)
def test_kl_in_the_reward_is_taken_over_but_for_estimators_that_are_missing(penalty, ours):
    algorithm = f"{{algorithm_type: ppo, kl_penalty_fn: {penalty}, kl_loss_fn: none}}"
    done = converted("model: {model_path: /m}\nalgorithm: " + algorithm)
    kl = {name: done.settings[f"trainer.ppo.{name}"] for name in ("kl_coef", "kl", "kl_in")}
    assert kl == {"kl_coef": 0.001, "kl": ours or "k2", "kl_in": "reward"}
    assert [line.key for line in done.lost] == ([] if ours else ["algorithm.kl_penalty_fn"])


@pytest.mark.parametrize(("loss", "lost"), [("", "kl_penalty_fn"), (", kl_loss_fn: k3", "kl_loss_fn")])
def test_of_kl_in_the_reward_and_in_the_loss_the_second_is_lost(loss, lost):
    done = converted(f"model: {{model_path: /m}}\nalgorithm: {{algorithm_type: ppo, kl_penalty_fn: k1{loss}}}")
    assert (done.settings["trainer.ppo.kl"], done.settings["trainer.ppo.kl_in"]) == ("k1", "reward")
    assert [line.key for line in done.lost] == [f"algorithm.{lost}"]


def test_a_kl_penalty_with_the_coefficient_0_leaves_the_loss_its_own():
    algorithm = "{algorithm_type: ppo, kl_penalty_fn: abs, kl_penalty_fn_args: {kl_coef: 0}, kl_loss_fn: k3}"
    done = converted("model: {model_path: /m}\nalgorithm: " + algorithm)
    kl = {name: done.settings[f"trainer.ppo.{name}"] for name in ("kl_coef", "kl", "kl_in")}
    assert kl == {"kl_coef": 0.001, "kl": "k3", "kl_in": "loss"} and not done.lost


@pytest.mark.parametrize("theirs", ["sft", "dpo", "raft"])
def test_kl_is_lost_where_ours_has_none_and_no_kl_is_not(theirs):
    text = f"model: {{model_path: /m}}\nalgorithm: {{algorithm_type: {theirs}, kl_penalty_fn: none, kl_loss_fn: %s}}"
    (line,) = converted(text % "k1").lost
    assert line.key == "algorithm.kl_loss_fn" and line.remark == f"{theirs} has no KL term here; go without it"
    assert not converted(text % "none").lost


def test_without_a_word_kl_is_as_trinity_has_it():
    for theirs, ours in [("ppo", "ppo"), ("grpo", "grpo"), ("rloo", "rloo"), ("reinforceplusplus", "reinforce_pp")]:
        done = converted(f"model: {{model_path: /m}}\nalgorithm: {{algorithm_type: {theirs}}}")
        kl = {name: done.settings[f"trainer.{ours}.{name}"] for name in ("kl_coef", "kl", "kl_in")}
        assert kl == {"kl_coef": 0.001, "kl": "k2", "kl_in": "loss"}
    done = converted("model: {model_path: /m}\nalgorithm: {algorithm_type: dapo}")
    assert done.settings["trainer.grpo.kl_coef"] == 0


def test_the_page_lists_the_conversion_of_each_estimator():
    rows = {row.split("|")[1].strip(" `"): row.split("|")[2:4] for row in tables()["kl"].splitlines()[2:]}
    assert list(rows) == ["k1", "k2", "k3", "low_var_kl", "corrected_k3", "abs"]
    for theirs, cells in rows.items():
        for cell, (reward, loss) in zip(cells, [(theirs, "none"), ("none", theirs)], strict=True):
            algorithm = f"{{kl_penalty_fn: {reward}, kl_loss_fn: {loss}}}"
            done = converted(f"model: {{model_path: /m}}\nalgorithm: {algorithm}")
            said = f" `{done.settings['trainer.ppo.kl']}`" + (", and training changes " if done.lost else " ")
            assert cell == said


def test_what_is_written_for_a_lost_kl_term_is_not_called_trinity_s_default():
    done = converted("model: {model_path: /m}\nalgorithm: {algorithm_type: ppo, kl_loss_fn: abs}")
    assert "trainer.ppo.kl is k2: in the place of the KL term that is lost" in done.remarks
