"""Credit where turns have alternatives: choices, tries and edits, whether or not the turns merged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from shared.config import GRPOConfig, RLOOConfig, StepGRPOConfig
from shared.experience import Experience, Sampling, Tokens
from shared.ledger.queries.lease import rewarded_rows
from shared.reward import EVERY_LESSON, Lesson
from tests.support.batches import precomputed, rows_batch
from trainer_service.algorithms.advantages import returns
from trainer_service.algorithms.attempts import attempts
from trainer_service.algorithms.grpo import GRPO
from trainer_service.algorithms.seam import one_each
from trainer_service.trajectories import trajectories_of

FREE = {"kl_coef": 0.0, "outlier_bound": None}
THOUGHT = 9
MERGES = pytest.mark.parametrize("merges", [True, False], ids=["merged", "rewritten"])


def row(
    number: int, prompt: Iterable[int], reward: float | None, parent: int | None = None, *, says: int = 0, **more
) -> Experience:
    """A reply of a thought and a token, named by its number. says: the turn with the same reply; 0: none has it."""
    reply = np.array([THOUGHT, 100 + (says or number)], np.int32)
    tokens = Tokens(np.array([*prompt], np.int32), reply, np.full(2, -1.0, np.float32))
    about = {"task_id": "t", "run_id": "x", "conversation_id": "c", "version": 0, "created_at": 0.0, **more}
    follows = None if parent is None else f"m{parent}"
    return Experience(number, f"m{number}", 0, follows, **about, reward=reward, tokens=tokens, sampling=Sampling())


def turn_after(earlier: Experience, number: int, reward: float | None, *, merges: bool) -> Experience:
    """A turn that continues another one. merges: its prompt repeats the thought of that one's reply."""
    reply = earlier.tokens.reply_ids[0 if merges else 1 :]
    return row(number, [*earlier.tokens.prompt_ids, *reply, 7], reward, earlier.id, run_id=earlier.run_id)


def earned(rows: list[Experience]) -> dict[int, float]:
    """The return of each turn that has one, by row."""
    found = {}
    for trajectory in trajectories_of(rows):
        if trajectory.outcome is not None or any(reward is not None for reward in trajectory.turn_rewards):
            for sequence in trajectory.sequences:
                of_actions = returns(sequence.rewards, 1.0)
                found |= {
                    name: float(of_actions[end]) for name, end in zip(sequence.row_ids, sequence.ends, strict=True)
                }
    return {name: round(value, 4) for name, value in found.items()}


def advantages(rows: list[Experience]) -> dict[int, float]:
    """Of GRPO, by row."""
    batch, algorithm = rows_batch(rows), GRPO(GRPOConfig(**FREE))
    units, found = algorithm.units(batch), {}
    constants, _ = algorithm.constants(batch, units, precomputed(batch), {})
    for unit, given in zip(units, constants["advantages"], strict=True):
        one = batch.sequences[unit.members[0]]
        found |= {name: round(float(given[end]), 3) for name, end in zip(one.row_ids, one.ends, strict=True)}
    return found


def scores(rows: list[Experience], *, by_turn: bool = False) -> dict[tuple[int, ...], float]:
    """Of each attempt of a batch, by its rows."""
    batch, config = rows_batch(rows), (StepGRPOConfig if by_turn else RLOOConfig)(**FREE)
    sequences = [batch.sequences[place] for place in batch.rewarded]
    names = [dict(zip(one.ends, one.row_ids, strict=True)) for one in sequences]
    found = attempts(batch, one_each(batch.rewarded), precomputed(batch), config, {}, by_turn=by_turn)
    return {tuple(names[one][end - 1] for one, _, end in attempt.spans): round(attempt.score, 4) for attempt in found}


def numbers(rows: list[Experience]) -> list[int]:
    """Of each turn, the number of turns before it."""
    batch, config = rows_batch(rows), StepGRPOConfig(**FREE)
    return [
        one.group[1] for one in attempts(batch, one_each(batch.rewarded), precomputed(batch), config, {}, by_turn=True)
    ]


@MERGES
def test_a_turn_earns_one_of_the_answers_to_the_next_prompt(merges):
    first = row(1, [1], None)
    for count in (1, 2, 4):
        answers = [turn_after(first, 2 + n, 1.0, merges=merges) for n in range(count)]
        assert earned([first, *answers]) == dict.fromkeys(range(1, 2 + count), 1.0)


@MERGES
def test_an_abandoned_try_earns_nothing_of_what_its_retry_led_to(merges):
    first = row(1, [1], None)
    tried, again = (turn_after(first, number, float(number == 3), merges=merges) for number in (2, 3))
    after = turn_after(again, 4, 1.0, merges=merges)
    assert earned([first, tried, again, after]) == {1: 2.0, 2: 0.0, 3: 2.0, 4: 1.0}, "the try that went on counts"


@MERGES
def test_the_turns_before_a_try_that_nobody_judged_earn_another_one(merges):
    first = row(1, [1], None)
    tries = [turn_after(first, number, reward, merges=merges) for number, reward in ((2, None), (3, 1.0))]
    rows = [first, *tries, row(4, [5], 0.5)]  # the last one is of another agent
    assert earned(rows) == {1: 1.5, 2: 0.5, 3: 1.5, 4: 0.5}
    whole = [replace(one, outcome=2.0, turn_reward=one.reward) for one in rows]
    assert earned(whole) == {1: 2.5, 2: 2.5, 3: 3.5, 4: 2.5}, "an outcome judges all"


def run(name: str, first: int, *, merges: bool, retried: bool = False) -> list[Experience]:
    """Four turns with 0.1 each. retried: the second one is a retry of another one, which nothing continues."""
    rows = [row(first, [1], 0.1, run_id=name)]
    if retried:
        rows.append(turn_after(rows[0], first + 1, 0.1, merges=merges))
    for number in range(first + 2, first + 5):
        before = rows[0] if number == first + 2 else rows[-1]
        rows.append(turn_after(before, number, 0.1, merges=merges))
    return rows


@MERGES
def test_a_retried_call_leaves_the_other_turns_of_a_run_one_attempt(merges):
    rows = [*run("x", 1, merges=merges, retried=True), *run("y", 11, merges=merges)]
    assert scores(rows) == {(1, 3, 4, 5): 0.4, (2,): 0.2, (11, 13, 14, 15): 0.4}
    assert advantages(rows) == {one.id: -1.155 if one.id == 2 else 0.577 for one in rows}


def test_turns_that_nothing_links_are_one_attempt_beside_a_retried_call():
    """The agent begins each prompt anew; one of them was asked twice."""
    x = [row(number, [min(number, 4) - (number == 3)], 0.1) for number in (1, 2, 3, 4)]
    x.append(row(5, [6], 0.1))
    y = [row(number, [number], 0.1, run_id="y") for number in (11, 12, 13, 14)]
    assert scores([*x, *y]) == {(1, 2, 4, 5): 0.4, (3,): 0.4, (11, 12, 13, 14): 0.4}
    assert set(advantages([*x, *y]).values()) == {0.0}


@MERGES
def test_a_helper_that_was_asked_the_same_twice_counts_once(merges):
    agent, helper = row(1, [1], 0.1), [row(number, [5], 0.1) for number in (2, 3)]
    rows = [agent, *helper, turn_after(agent, 4, 0.1, merges=merges)]
    other = row(11, [1], 0.1, run_id="y")
    other = [other, row(12, [5], 0.1, run_id="y"), turn_after(other, 13, 0.1, merges=merges)]
    assert scores([*rows, *other]) == {(1, 2, 4): 0.3, (3,): 0.3, (11, 12, 13): 0.3}
    assert earned([*rows, *other]) == {1: 0.3, 2: 0.2, 3: 0.2, 4: 0.1, 11: 0.3, 12: 0.2, 13: 0.1}


@MERGES
def test_by_turn_the_turns_after_a_retried_call_keep_their_numbers(merges):
    rows = run("x", 1, merges=merges, retried=True)
    assert numbers(rows) == [0, 1, 1, 2, 3]
    assert scores(rows, by_turn=True) == {(1,): 0.4, (2,): 0.1, (3,): 0.3, (4,): 0.2, (5,): 0.1}


def test_by_turn_a_call_that_was_asked_twice_moves_no_turn_of_another_agent():
    rows = [row(1, [1], 0.1), row(2, [2], 0.1), row(3, [2], 0.1), row(4, [4], 0.1)]
    assert numbers(rows) == [0, 1, 1, 2]


@MERGES
def test_an_edit_s_score_holds_what_turns_of_other_agents_earned_before_it(merges):
    first, helper = row(1, [1], 0.1), row(2, [5], 0.2)
    rows = [first, helper, *(turn_after(first, number, 0.4, merges=merges) for number in (3, 4))]
    assert scores(rows) == {(1, 2, 3): 0.7, (4,): 0.7}


def test_a_helper_earns_the_path_that_went_on_and_not_an_edit_of_its_beginning():
    """The path has one turn left after the helper, and four in all; the edit has two left, and three in all."""
    rows = [row(1, [1], 0.1)]
    for number in (2, 3):
        rows.append(turn_after(rows[-1], number, 0.1, merges=True))
    helper = [row(number, [50], 0.1) for number in (4, 5)]
    last, edit = turn_after(rows[2], 6, 1.0, merges=True), turn_after(rows[0], 7, 0.1, merges=True)
    rows += [*helper, last, edit, turn_after(edit, 8, 0.1, merges=True)]
    assert (earned(rows)[4], earned(rows)[5]) == (1.1, 1.1)
    assert scores(rows) == {(1, 2, 3, 4, 6): 1.4, (5,): 1.4, (7, 8): 0.4}


@MERGES
def test_a_branch_continues_the_turn_that_its_prompt_repeats_and_not_a_shorter_one_with_the_same_reply(merges):
    first = row(1, [1], None)
    second = turn_after(first, 2, None, merges=merges)
    dead = [turn_after(second, 3, 0.0, merges=merges), row(4, [1], 0.0, says=1)]
    rows = [first, second, *dead, turn_after(second, 5, None, merges=merges)]
    rows.append(turn_after(rows[-1], 6, 1.0, merges=merges))
    assert earned(rows) == {1: 1.0, 2: 1.0, 3: 0.0, 4: 0.0, 5: 1.0, 6: 1.0}
    assert scores(rows) == {(1, 2, 5, 6): 1.0, (3,): 0.0, (4,): 0.0}


@MERGES
def test_a_branch_continues_the_turn_that_it_names_and_not_a_later_one_with_the_same_tokens(merges):
    first = row(1, [1], None)
    rows = [first, turn_after(first, 2, 0.0, merges=merges), row(3, [1], 0.0, says=1)]
    rows.append(turn_after(first, 4, 1.0, merges=merges))
    rows.append(turn_after(rows[-1], 5, 1.0, merges=merges))
    assert earned(rows) == {1: 2.0, 2: 0.0, 3: 0.0, 4: 2.0, 5: 1.0}


@MERGES
def test_the_score_of_an_alternative_is_bounded_as_a_whole(merges):
    first = row(1, [1], 1.0)
    rows = [first, *(turn_after(first, number, 1e6 if number == 2 else 1.0, merges=merges) for number in (2, 3))]
    rows += [row(number, [1], 1.0 + number % 3, run_id=str(number)) for number in range(11, 20)]
    batch, config = rows_batch(rows), RLOOConfig(kl_coef=0.0)
    run, edit, *_ = attempts(batch, one_each(batch.rewarded), precomputed(batch), config, {})
    assert run.score < 100 and edit.score == 2.0


@dataclass(frozen=True)
class Turn:
    """parent: the turn that it continues. words: of the user. says: the turn with this reply, or itself."""

    parent: int | None
    words: int
    reward: float | None
    says: int


def drawn(draw: np.random.Generator, twins: float = 0.0) -> list[Turn]:
    """Random turns. twins: part of the other tries that have the same reply."""
    turns: list[Turn] = []
    for number in range(int(draw.integers(2, 10))):
        kind = draw.random()
        reward = float(2**number) if draw.random() < 0.4 else None  # each sum of rewards has one meaning
        if number and kind < 0.25 + twins / 4:
            tried = turns[draw.integers(number)]  # another try
            says = tried.says if draw.random() < twins else number
            turns.append(Turn(tried.parent, tried.words, reward, says))
        else:
            parent = None if not number or kind < 0.4 else int(draw.integers(max(0, number - 3), number))
            turns.append(Turn(parent, 200 + number, reward, number))
    return turns


def rendered(turns: list[Turn], thoughts: str, *, linked: bool) -> list[Experience]:
    """The rows of such turns. thoughts: whether prompts keep or drop those of earlier replies; odd: some drop."""
    rows: list[Experience] = []
    for number, turn in enumerate(turns):
        drops = thoughts == "drop" or (thoughts == "odd" and turn.words % 2)
        prompt, above = [turn.words], turn.parent
        while above is not None:
            prompt = [turns[above].words, *([] if drops else [THOUGHT]), 101 + turns[above].says, *prompt]
            above = turns[above].parent
        link = None if turn.parent is None or not linked else turn.parent + 1
        rows.append(row(number + 1, prompt, turn.reward, link, says=turn.says + 1))
    return rows


def claimed(rows: list[Experience]) -> set[int]:
    """The rows on which the claim lets a reward act."""
    taught = [(one, int(Lesson.REWARD) if one.reward is not None else 0) for one in rows]
    return rewarded_rows(taught, lambda first: {one.id: one.tokens.prompt_ids.tobytes() for one in first})


def test_returns_do_not_depend_on_whether_tokens_merge_and_turns_without_one_are_those_that_the_claim_leaves_out():
    draw = np.random.default_rng(0)
    for number in range(150):
        turns = drawn(draw, twins=0.0 if number < 100 else 0.5)
        merged = rendered(turns, "keep", linked=True)
        expected, acts = earned(merged), claimed(merged)
        assert expected.keys() == acts and 0 not in expected.values(), "a known return has a reward in it"
        if number < 100:
            assert earned(rendered(turns, "keep", linked=False)) == expected, "tokens show what links name"
        for thoughts in ("keep", "drop", "odd"):
            rows = rendered(turns, thoughts, linked=True)
            assert (earned(rows), claimed(rows)) == (expected, acts), turns
            for by_turn in (False, True) if acts else ():
                assert scores(rows, by_turn=by_turn) == scores(merged, by_turn=by_turn), turns
            left = [replace(one, acts=int(EVERY_LESSON) if one.id in acts else 0) for one in rows]
            assert earned(left) == expected, "as the trainer gets them"
            whole = [replace(one, outcome=0.5, turn_reward=one.reward) for one in rows]
            assert earned(whole) == earned([replace(one, outcome=0.5, turn_reward=one.reward) for one in merged])
