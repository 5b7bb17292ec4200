"""Rows become trajectories."""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import numpy as np
import pytest

from shared.experience import Experience, Sampling, Tokens
from tests.support.batches import assemble
from trainer_service.algorithms.advantages import gae
from trainer_service.batch import make_batch
from trainer_service.trajectories import TokenSequence, trajectories_of


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


def test_it_is_counted_why_turns_stay_apart():
    first = row(1, [1, 2], [3, 4], run="r")
    others = {
        "rewritten": replace(row(2, [1, 2, 9, 5], [7], run="r"), parent_id="m1"),
        "branch": row(2, [1, 2], [7], run="r"),
        "apart": row(2, [8, 8], [7], run="r"),
    }
    for reason, other in others.items():
        (trajectory,) = trajectories_of([first, other])
        assert trajectory.unmerged == {reason: 1}
    (merged,) = trajectories_of([first, row(2, [1, 2, 3, 4, 5], [7], run="r")])
    assert not merged.unmerged


def returns(sequence: TokenSequence) -> list[float]:
    """Of each action, undiscounted and without a critic."""
    advantages, _ = gae(sequence.rewards, np.zeros_like(sequence.rewards), gamma=1.0, lam=1.0)
    return advantages.round(6).tolist()


def test_a_run_of_eight_turns_rewarded_once_gives_every_token_the_return():
    rows = [row(n, list(range(2 * n - 1)), [2 * n - 1], run="r") for n in range(1, 9)]
    (merged,) = assemble([replace(one, reward=0.8, outcome=0.8) for one in rows])
    assert merged.row_ids == list(range(1, 9))
    assert returns(merged) == pytest.approx([0.8] * 8)
    assert merged.rewards.sum() == pytest.approx(0.8)


def test_a_run_whose_turns_do_not_merge_gives_every_token_the_same_return():
    rows = [row(n, [n, 0], [7, 7], run="r") for n in range(1, 9)]
    apart = assemble([replace(one, reward=0.8, outcome=0.8) for one in rows])
    assert [returns(sequence) for sequence in apart] == [pytest.approx([0.8, 0.8])] * 8


def test_a_turn_s_own_reward_counts_for_it_and_earlier_turns_but_not_for_later_ones():
    for merges in (True, False):
        rows = [row(n, list(range(2 * n - 1)) if merges else [n, 0], [2 * n - 1], run="r") for n in range(1, 5)]
        rows = [replace(one, outcome=1.0, turn_reward=0.25 if one.id == 2 else None) for one in rows]
        found = [value for sequence in assemble(rows) for value in returns(sequence)]
        assert found == pytest.approx([1.25, 1.25, 1.0, 1.0])


@pytest.mark.parametrize("merges", [True, False])
def test_turns_after_the_last_reward_are_separate_because_their_return_is_unknown(merges):
    """As 0 they would count as thumbs down."""
    rows = [row(n, list(range(2 * n - 1)) if merges else [n, 0], [2 * n - 1], run="r") for n in range(1, 5)]
    rows = [replace(one, reward=1.0 if one.id == 2 else None) for one in rows]
    batch = make_batch(rows)
    spoken, silent = batch.trajectories
    assert [number for one in spoken.sequences for number in one.row_ids] == [1, 2]
    assert [number for one in silent.sequences for number in one.row_ids] == [3, 4]
    assert [value for one in spoken.sequences for value in returns(one)] == pytest.approx([1.0, 1.0])
    assert batch.rewarded == batch.members[0]
    whole = trajectories_of([replace(one, outcome=1.0, turn_reward=one.reward) for one in rows])
    assert len(whole) == 1, "what was said of the whole is about them, too"


def test_a_choice_without_signals_does_not_count_as_0_next_to_one_with_signals():
    rows = [row(n, [1], [n + 1], run="r", reward=0.5) for n in range(1, 4)]
    for unsaid in (1, 2, 3):
        batch = make_batch([replace(one, reward=None) if one.id == unsaid else one for one in rows])
        judged = [one for one in (1, 2, 3) if one != unsaid]
        assert [batch.sequences[place].row_ids for place in batch.rewarded] == [[one] for one in judged]


def test_turns_of_interleaved_agents_in_a_run_earn_later_rewards():
    agent = row(1, [1], [2], run="r"), row(3, [1, 2, 3], [4], run="r", reward=1.0)
    helper = row(2, [9], [8], run="r", reward=0.5), row(4, [9, 8, 7], [6], run="r", reward=0.25)
    first, second = assemble([*agent, *helper])
    assert (first.row_ids, second.row_ids) == ([1, 3], [2, 4])
    assert returns(first) == pytest.approx([1.75, 1.25])
    assert returns(second) == pytest.approx([1.75, 0.25])


def test_alternatives_do_not_earn_each_other_s_rewards():
    """Two choices of one reply, the first of which is continued; and a retry of the turn after it."""
    chosen, other = row(1, [1], [2], run="r", reward=0.1), row(2, [1], [3], run="r", reward=1.0)
    turn, retry = row(3, [1, 2, 4], [5], run="r", reward=0.2), row(4, [1, 2, 4], [6], run="r", reward=2.0)
    found = {tuple(sequence.row_ids): returns(sequence) for sequence in assemble([chosen, other, turn, retry])}
    assert found == {(1, 3): pytest.approx([0.3, 0.2]), (2,): pytest.approx([1.0]), (4,): pytest.approx([2.0])}


@pytest.mark.parametrize("of_trunk", [None, 0.0])
def test_branches_do_not_earn_each_other_s_rewards_whether_or_not_their_trunk_has_a_reward(of_trunk):
    """A conversation of three turns, and two edits of it: of the second message and of the third."""
    trunk = row(1, [1], [2], run="r"), row(2, [1, 2, 3], [4], run="r"), row(3, [1, 2, 3, 4, 5], [6], run="r")
    edits = row(4, [1, 2, 7], [8], run="r", reward=1.0), row(5, [1, 2, 3, 4, 9], [8], run="r", reward=-1.0)
    spoken, *silent = trajectories_of([*(replace(one, reward=of_trunk) for one in trunk), *edits])
    found = {
        name: returns(one)[end] for one in spoken.sequences for name, end in zip(one.row_ids, one.ends, strict=True)
    }
    assert found == ({1: 0, 2: 0, 3: 0, 4: 1, 5: -1} if of_trunk == 0 else {1: -1, 2: -1, 4: 1, 5: -1})
    assert [one.sequences[0].row_ids for one in silent] == ([] if of_trunk == 0 else [[3]])
    assert set(spoken.lineage.sides) > {None}
    assert spoken.unmerged.keys() == {"branch"}


def test_a_history_that_was_rewritten_is_no_alternative():
    """The prompt of the third turn begins with the first turn's tokens; those of the second are rendered anew."""
    first, second = row(1, [1], [2], run="r"), row(2, [1, 2, 3], [4], run="r")
    third = replace(row(3, [1, 2, 3, 5], [6], run="r", reward=1.0), parent_id="m2")
    assert [returns(sequence) for sequence in assemble([first, second, third])] == [[1.0, 1.0], [1.0]]
    fork = replace(third, parent_id="m1")
    assert [returns(sequence) for sequence in assemble([first, second, fork])] == [[0.0, 0.0], [1.0]]


@pytest.mark.parametrize(
    ("first", "second", "is_one"), [("d#a", "d#b", False), ("d#01", "d#1", False), ("d#1", "d", True)]
)
def test_turns_that_continue_choices_of_one_message_outside_of_the_batch_are_alternatives(first, second, is_one):
    """A caller's id may contain the mark that separates a message from its choice."""
    silent = replace(row(1, [1, 2], [3], run="r"), parent_id=first, reward=None)
    judged = replace(row(2, [7, 8], [4], run="r", reward=1.0), parent_id=second)
    found = {one.row_ids[0]: returns(one) for one in assemble([silent, judged])}
    assert found == {1: [0.0] if is_one else [1.0], 2: [1.0]}


def test_signals_of_another_key_group_about_a_run_of_the_same_name_are_separate():
    mine = replace(row(1, [1], [2], run="r", reward=1.0), key_group="mine", outcome=1.0)
    theirs = replace(row(2, [1, 2, 3], [4], run="r", reward=-9.0), key_group="theirs", outcome=-9.0)
    assert [returns(sequence) for sequence in assemble([mine, theirs])] == [[1.0], [-9.0]]


def assemble_by_comparing(rows: list[Experience]) -> list[list[int]]:
    """Which rows are merged, found by comparing each row with all trajectories, and all turns, before it."""
    found: list[tuple[list[int], list[int]]] = []
    turns: list[list[int]] = []
    for one in rows:
        prompt = one.tokens.prompt_ids.tolist()
        fits = [known for known in found if prompt[: len(known[0])] == known[0]]
        longest = max(fits, key=lambda known: len(known[0]), default=([], []))
        turns.append([*prompt, *one.tokens.reply_ids.tolist()])
        longer = (turn for turn in turns if len(turn) > len(longest[0]))
        if fits and not any(prompt[: len(turn)] == turn for turn in longer):
            longest[0][:] = turns[-1]
            longest[1].append(one.id)
        else:
            found.append((list(turns[-1]), [one.id]))
    return [row_ids for _, row_ids in found]


def test_branches_of_a_conversation_are_merged_as_by_comparing_each_with_all():
    draw = np.random.default_rng(0)
    for _ in range(50):
        rows, texts = [], [[1]]
        for number in range(40):
            prompt = [*texts[draw.integers(len(texts))], *draw.integers(0, 2, draw.integers(0, 3)).tolist()]
            reply = draw.integers(0, 2, draw.integers(1, 3)).tolist()
            texts.append([*prompt, *reply])
            rows.append(row(number + 1, prompt, reply, run="r"))
        assert [trajectory.row_ids for trajectory in assemble(rows)] == assemble_by_comparing(rows)


def test_ten_thousand_branches_take_less_than_half_the_work_of_comparing_each_with_all():
    rows = [row(n + 1, [1, 2, 3, *divmod(n, 200)], [4, 5, 6], run="r") for n in range(10_000)]
    took = []
    gc.disable()  # it looks at all that earlier tests have left
    try:
        for make, count in ((assemble_by_comparing, 2_500), (assemble, 10_000)):
            began = time.process_time()  # of this process: others beside it do not count
            assert len(make(rows[:count])) == count
            took.append(time.process_time() - began)
    finally:
        gc.enable()
    assert took[1] < took[0] * 16 / 2  # comparing four times as many takes sixteen times the work
