"""GRPO, RLOO and GRPO by turn: numbers computed by hand, and the formulas in float64."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch

from shared.config import GRPOConfig, RLOOConfig, StepGRPOConfig
from shared.experience import Experience, Sampling, Tokens
from tests.support.batches import loss_of, precomputed, rows_batch
from trainer_service.algorithms.attempts import attempts
from trainer_service.algorithms.grpo import GRPO
from trainer_service.algorithms.rloo import RLOO
from trainer_service.algorithms.seam import one_each
from trainer_service.algorithms.step_grpo import StepGRPO

FREE = {"kl_coef": 0.0, "outlier_bound": None}


def row(number: int, task: str | None, run: str | None, reward: float | None, *, prompt=(1, 2), **more) -> Experience:
    """A reply of two tokens."""
    prompt, reply = np.array(prompt, np.int32), np.array([50 + number, 51], np.int32)
    tokens = Tokens(prompt, reply, np.full(2, -1.0, np.float32))
    name = f"m{number}"
    given = {"conversation_id": name, "version": 0, "created_at": 0.0, "sampling": Sampling(), "parent_id": None}
    return Experience(
        **{**given, **more}, id=number, msg_id=name, choice=0, task_id=task, run_id=run, reward=reward, tokens=tokens
    )


def advantages(algorithm, rows, memory=None, **seen) -> tuple[list[list[float]], dict[str, float]]:
    """Of each action of each sequence, and the figures."""
    batch = rows_batch(rows)
    constants, figures = algorithm.constants(
        batch, algorithm.units(batch), precomputed(batch, **seen), {} if memory is None else memory
    )
    return [one.tolist() for one in constants["advantages"]], figures


def attempts_at(task: str, *rewards: float, first: int = 1) -> list[Experience]:
    return [row(first + n, task, str(n), reward) for n, reward in enumerate(rewards)]


def test_grpo_compares_the_runs_of_a_task_with_their_mean():
    rows = [*attempts_at("a", 1, 0, 0, 0), *attempts_at("b", 3, 5, first=10)]
    got, figures = advantages(GRPO(GRPOConfig(**FREE)), rows)
    assert [one[0] for one in got] == pytest.approx([1.5, -0.5, -0.5, -0.5, -math.sqrt(0.5), math.sqrt(0.5)])
    assert all(first == second for first, second in got), "one advantage for all tokens of a run"
    assert (figures["groups"], figures["groups_of_one"], figures["groups_of_equals"]) == (2, 0, 0)


def test_rloo_compares_each_run_with_the_mean_of_the_others():
    got, _ = advantages(RLOO(RLOOConfig(**FREE)), attempts_at("a", 1, 0, 5))
    assert [one[0] for one in got] == pytest.approx([1 - 2.5, 0 - 3, 5 - 0.5])


def test_differences_are_divided_by_the_deviation_of_all_rewards_or_by_nothing():
    rows = [*attempts_at("a", 1, 0), *attempts_at("b", 9, 10, first=10)]
    got, _ = advantages(GRPO(GRPOConfig(**FREE, scale="none")), rows)
    assert [one[0] for one in got] == [0.5, -0.5, -0.5, 0.5]
    got, _ = advantages(GRPO(GRPOConfig(**FREE, scale="batch")), rows)
    assert [one[0] for one in got] == pytest.approx(np.array([0.5, -0.5, -0.5, 0.5]) / np.std([1, 0, 9, 10]))


def test_a_group_of_equals_teaches_nothing():
    got, figures = advantages(GRPO(GRPOConfig(**FREE)), attempts_at("a", 0.7, 0.7, 0.7))
    assert not np.any(got)
    assert figures["groups_of_equals"] == 1


def test_a_run_that_is_alone_is_compared_with_the_mean_of_all_and_counted():
    algorithm, memory = GRPO(GRPOConfig(**FREE, baseline_sequences=4)), {}
    advantages(algorithm, attempts_at("a", 0, 2), memory)
    got, figures = advantages(algorithm, [row(1, "b", "1", 4.0), row(2, None, None, 2.0)], memory)
    every = [0, 2, 4, 2]
    assert [one[0] for one in got] == pytest.approx([(4 - 2) / np.std(every), 0])
    assert (figures["groups_of_one"], figures["baseline"]) == (2, 2)


def test_a_task_of_another_group_of_keys_is_another_task():
    rows = [row(1, "a", "1", 1.0, key_group="x"), row(2, "a", "1", 0.0, key_group="y")]
    assert advantages(GRPO(GRPOConfig(**FREE)), rows)[1]["groups_of_one"] == 2


def test_alternatives_of_a_message_without_a_task_are_a_group():
    rows = [row(n, None, None, reward, conversation_id="c") for n, reward in ((1, 1.0), (2, 0.0), (3, 0.5))]
    got, figures = advantages(RLOO(RLOOConfig(**FREE)), rows)
    assert [one[0] for one in got] == pytest.approx([0.75, -0.75, 0])
    assert figures["groups"] == 1


def test_choices_of_a_message_without_a_task_are_a_group_also_where_one_of_them_was_continued():
    """Each choice is a conversation of its own, named by its first exchange; here the second one has another turn."""
    said = [(1, "m", 1.0), (2, "m#1", None), (3, "m#2", 0.5)]
    rows = [replace(row(n, None, None, reward, conversation_id=c), msg_id="m", choice=n - 1) for n, c, reward in said]
    rows.append(row(4, None, None, 0.0, conversation_id="m#1", prompt=(1, 2, 52, 51, 9), parent_id="m#1"))
    got, figures = advantages(RLOO(RLOOConfig(**FREE)), [*rows, row(5, None, None, 0.2)])
    assert [one[0] for one in got[:3]] == pytest.approx([0.75, -0.75, 0.0])
    assert (figures["groups"], figures["groups_of_one"]) == (2, 1)


def test_choices_of_a_message_for_different_prompts_are_not_compared():
    """A plain completion takes several prompts: here two, with two choices each."""
    said = [(1, (1, 2), 1.0), (2, (1, 2), 0.0), (3, (8, 9), 5.0), (4, (8, 9), 3.0)]
    rows = [replace(row(n, None, None, reward, prompt=p), msg_id="m", choice=n - 1) for n, p, reward in said]
    got, figures = advantages(RLOO(RLOOConfig(**FREE)), rows)
    assert [one[0] for one in got] == [1, -1, 2, -2]
    assert figures["groups"] == 2


def test_a_run_in_several_sequences_is_one_run():
    """Its turns did not merge; the outcome counts once, and all of its tokens have the run's advantage."""
    broken = [row(n, "a", "0", 1.0, outcome=1.0, prompt=(n, 9), parent_id=f"m{n - 1}") for n in (1, 2, 3)]
    got, figures = advantages(RLOO(RLOOConfig(**FREE)), [*broken, row(9, "a", "1", 0.0)])
    assert got == [[1, 1]] * 3 + [[-1, -1]]
    assert figures["groups"] == 1


def two_turns(first: int, run: str, rewards: tuple[float, float]) -> list[Experience]:
    """A run of two turns that merge."""
    one = row(first, "a", run, rewards[0])
    return [one, row(first + 1, "a", run, rewards[1], prompt=(1, 2, 50 + first, 51, 7), parent_id=one.msg_id)]


def retry(reward: float) -> Experience:
    """A second try of the second turn of `two_turns(1, "x", …)`."""
    return row(3, "a", "x", reward, prompt=(1, 2, 51, 51, 7), parent_id="m1")


def test_by_turn_another_try_of_a_turn_is_compared_with_that_turn():
    later = row(4, "a", "x", 1.0, prompt=(1, 2, 51, 51, 7, 53, 51, 8), parent_id="m3")
    batch = rows_batch([*two_turns(1, "x", (0.0, 1.0)), retry(1.0), later, *two_turns(11, "y", (0.0, 0.0))])
    config = StepGRPOConfig(**FREE, scale="none")
    found = attempts(batch, one_each(batch.rewarded), precomputed(batch), config, {}, by_turn=True)
    assert [one.group[1] for one in found] == [0, 1, 1, 2, 0, 1]


def test_a_run_with_two_answers_to_one_prompt_and_one_outcome_is_one_attempt():
    run = [row(n, "a", "x", 1.0, outcome=1.0) for n in (1, 2)]
    got, _ = advantages(RLOO(RLOOConfig(**FREE)), [*run, row(9, "a", "y", 0.0)])
    assert got == [[1, 1], [1, 1], [-1, -1]]
    memory = {}
    advantages(GRPO(GRPOConfig(**FREE)), attempts_at("b", 0, 0.5), memory)
    got, figures = advantages(GRPO(GRPOConfig(**FREE)), run, memory)
    assert figures["groups_of_one"] == 1 and got[0][0] == got[1][0] > 0, "compared with the mean of all scores"


def test_by_turn_two_answers_to_one_prompt_and_one_outcome_are_one_attempt():
    run = [replace(one, reward=1.0, outcome=1.0) for one in (*two_turns(1, "x", (0.0, 0.0)), retry(0.0))]
    got, _ = advantages(StepGRPO(StepGRPOConfig(**FREE, scale="none")), [*run, *two_turns(11, "y", (0.0, 0.0))])
    assert got == [[0.5] * 4, [0.5] * 2, [-0.5] * 4]


def test_what_the_turns_before_a_fork_earned_is_in_its_score():
    batch = rows_batch([*two_turns(1, "x", (1.0, 0.0)), retry(0.0)])
    found = attempts(batch, one_each(batch.rewarded), precomputed(batch), RLOOConfig(**FREE), {})
    assert [one.score for one in found] == [1, 1]


def test_what_the_turns_before_a_fork_paid_is_in_its_score():
    config = RLOOConfig(outlier_bound=None, kl_coef=0.5, kl="k1", kl_in="reward")
    batch = rows_batch([*two_turns(1, "x", (1.0, 0.0)), retry(0.0)])
    seen = precomputed(batch, reference=[np.full(len(one.actions), -1.1, np.float32) for one in batch.sequences])
    found = attempts(batch, one_each(batch.rewarded), seen, config, {})
    assert [one.score for one in found] == pytest.approx([1 - 0.5 * 4 * 0.1] * 2)


def test_by_turn_a_reward_is_credit_of_its_turn_and_those_before():
    rows = [*two_turns(1, "x", (1.0, 0.0)), *two_turns(11, "y", (0.0, 1.0)), *two_turns(21, "z", (0.0, 0.0))]
    got, figures = advantages(StepGRPO(StepGRPOConfig(**FREE, scale="none")), rows)
    third = 1 / 3  # first turns earn 1, 1, 0; second turns 0, 1, 0
    assert got == [
        pytest.approx([third, third, -third, -third]),
        pytest.approx([third, third, 2 * third, 2 * third]),
        pytest.approx([-2 * third] * 2 + [-third] * 2),
    ]
    assert figures["groups"] == 2


def test_a_turn_that_no_other_run_reached_is_counted_as_alone():
    rows = [*two_turns(1, "x", (0.0, 1.0)), row(11, "a", "y", 0.0)]
    got, figures = advantages(StepGRPO(StepGRPOConfig(**FREE, scale="none")), rows)
    assert figures["groups_of_one"] == 1
    assert got == [pytest.approx([0.5, 0.5, 1 / 3, 1 / 3]), [-0.5, -0.5]], "the mean of 1, 1 and 0 is ⅔"


def test_with_an_outcome_alone_turns_are_compared_as_runs_are():
    rows = []
    for first, run, outcome in ((1, "x", 1.0), (11, "y", 0.0), (21, "z", 0.25)):
        one = row(first, "a", run, outcome, outcome=outcome)
        after = (1, 2, 50 + first, 51, 7)
        rows += [one, row(first + 1, "a", run, outcome, outcome=outcome, prompt=after, parent_id=one.msg_id)]
    by_turn, _ = advantages(StepGRPO(StepGRPOConfig(**FREE)), rows)
    by_run, _ = advantages(GRPO(GRPOConfig(**FREE)), rows)
    assert by_turn == by_run


def test_a_kl_penalty_in_the_reward_counts_in_the_score_of_a_run():
    config = RLOOConfig(outlier_bound=None, kl_coef=0.5, kl="k1", kl_in="reward")
    rows = attempts_at("a", 1, 0)
    got, _ = advantages(RLOO(config), rows, reference=[np.array([-1.5, -1.3], np.float32), np.full(2, -1, np.float32)])
    score = 1 - 0.5 * (0.5 + 0.3)
    assert [one[0] for one in got] == pytest.approx([score, -score])


@pytest.mark.parametrize("prompt", [(1, 2, 51, 51, 7), (3, 9)], ids=["merged", "rewritten"])
def test_a_choice_pays_the_kl_penalty_of_the_turns_after_it_whether_or_not_they_merged(prompt):
    config = RLOOConfig(outlier_bound=None, kl_coef=0.5, kl="k1", kl_in="reward")
    rows = [row(number, None, None, 1.0, conversation_id="c") for number in (1, 2)]
    rows.append(row(3, None, None, 0.0, conversation_id="c", prompt=prompt, parent_id="m1"))
    batch = rows_batch(rows)
    seen = precomputed(batch, reference=[np.full(len(one.actions), -1.1, np.float32) for one in batch.sequences])
    first, *_ = attempts(batch, one_each(batch.rewarded), seen, config, {})
    assert first.score == pytest.approx(1 - 0.5 * 4 * 0.1)


def test_by_turn_a_kl_penalty_in_the_reward_counts_for_later_turns_also_where_turns_do_not_merge():
    config = StepGRPOConfig(outlier_bound=None, scale="none", kl_coef=0.5, kl="k1", kl_in="reward")
    merged = [*two_turns(1, "x", (0.0, 1.0)), *two_turns(11, "y", (0.0, 0.0))]
    apart = [replace(one, tokens=replace(one.tokens, prompt_ids=np.array([one.id, 9], np.int32))) for one in merged]
    gaps = [0.5, 0.3, 0.9, 0.7, 0.0, 0.0, 0.0, 0.0]  # x is away from the base, y is not
    reference = np.array(gaps, np.float32) * -1 - 1
    together, _ = advantages(StepGRPO(config), merged, reference=np.split(reference, 2))
    alone, _ = advantages(StepGRPO(config), apart, reference=np.split(reference, 4))
    first, second = (1 - 0.5 * 2.4) / 2, (1 - 0.5 * 1.6) / 2
    assert np.concatenate(together) == pytest.approx([first] * 2 + [second] * 2 + [-first] * 2 + [-second] * 2)
    assert np.concatenate(alone) == pytest.approx(np.concatenate(together))


def oracle(runs: dict[str, list[float]]) -> dict[str, list[float]]:
    """Shao et al. 2024, section 4.1.2, in exact means and float64."""
    return {
        task: [(r - statistics.fmean(rewards)) / statistics.stdev(rewards) for r in rewards]
        for task, rewards in runs.items()
    }


def test_loss_and_gradient_of_grpo_equal_the_formula_in_float64():
    draw = np.random.default_rng(0)
    runs: dict[str, list[float]] = {f"t{n}": draw.normal(size=int(draw.integers(2, 6))).tolist() for n in range(5)}
    rows, order = [], []
    for task, rewards in runs.items():
        for number, reward in enumerate(rewards):
            rows.append(row(len(rows) + 1, task, str(number), float(reward)))
            order.append((task, number))
    batch = rows_batch(rows)
    drawn = {name: draw.normal(-1, 0.3, (len(rows), 2)).astype(np.float32) for name in ("now", "proximal", "reference")}
    logprobs = [torch.from_numpy(one.copy()).requires_grad_() for one in drawn["now"]]
    seen = precomputed(batch, proximal=list(drawn["proximal"]), reference=list(drawn["reference"]))
    config = GRPOConfig(outlier_bound=None, kl_coef=0.04, dual_clip=None, mean="sequences")
    loss, _ = loss_of(GRPO(config), batch, seen, logprobs)
    loss.backward()

    exact = torch.from_numpy(drawn["now"].astype(np.float64)).requires_grad_()
    proximal, reference = (torch.from_numpy(drawn[name].astype(np.float64)) for name in ("proximal", "reference"))
    expected, found = torch.zeros((), dtype=torch.float64), oracle(runs)
    for place, (task, number) in enumerate(order):
        advantage = found[task][number]
        ratio = torch.exp(exact[place] - proximal[place])
        clipped = torch.minimum(ratio * advantage, torch.clamp(ratio, 0.8, 1.2) * advantage)
        behind = torch.exp(reference[place] - exact[place])
        kl = behind - torch.log(behind) - 1
        expected = expected - (clipped - 0.04 * kl).mean() / len(order)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(np.stack([one.grad.numpy() for one in logprobs]), exact.grad.numpy(), atol=1e-6)


def test_advantages_of_leave_one_out_sum_to_zero_in_each_group():
    draw = np.random.default_rng(1)
    rows = [row(n + 1, f"t{n % 3}", str(n), float(draw.normal())) for n in range(12)]
    got, _ = advantages(RLOO(RLOOConfig(**FREE)), rows)
    sums: dict[str | None, float] = defaultdict(float)
    for one, (first, _) in zip(rows, got, strict=True):
        sums[one.task_id] += first
    assert list(sums.values()) == pytest.approx([0, 0, 0], abs=1e-6)
