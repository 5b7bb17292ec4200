"""What is said of rows reaches the batch: ratings, corrections, preferences and demonstrations, from a real ledger."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select, update

from shared.config import RewardConfig, TrainerConfig
from shared.experience import Experience, Tokens
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger
from shared.ledger.tables import experiences, payloads
from shared.reward import SCORES, Kind, Signal
from shared.stop_request import StopRequest
from tests.support.samples import sample
from tests.support.servers import wait_until
from trainer_service import claim
from trainer_service.algorithms.seam import Batch
from trainer_service.answers import answer_tokenizer
from trainer_service.batch import make_batch
from trainer_service.broadcast import pack_rows, unpack_rows
from trainer_service.claim import Claimer

KINDS: tuple[Kind, ...] = ("rating", "correction", "preferred_over", "demonstration")
END = 2  # <|im_end|> of the tiny model


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger.open(f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
    yield opened
    opened.close()


@pytest.fixture
def either(tmp_path: Path, database_url: str | None) -> Iterator[Ledger]:
    """A ledger in each kind of database."""
    opened = Ledger.open(database_url or f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
    yield opened
    opened.close()


def tokens(reply: list[int], prompt: list[int] | None = None) -> Tokens:
    ids = (np.array(part, np.int32) for part in (prompt or [1, 4, 9], reply))
    return Tokens(*ids, -np.ones(len(reply), np.float32))


def record(ledger: Ledger, name: str, reply: list[int], prompt: list[int] | None = None, **more: Any) -> None:
    with ledger.write() as connection:
        transitions.record(connection, [sample(name, tokens=tokens(reply, prompt), **more)])


def say(ledger: Ledger, *names: str, **signals: str) -> None:
    said = [Signal(kind, text=text) for kind, text in signals.items()]  # type: ignore[arg-type]
    with ledger.write() as connection:
        about: dict[str, Any] = {"task_id": None, "run_id": None, "rule": RewardConfig(), "learned": frozenset(KINDS)}
        transitions.apply_feedback(connection, msg_ids=names, signals=said, **about)


def leased(ledger: Ledger) -> list[Experience]:
    """Commit, claim and load everything."""
    with ledger.write() as connection:
        transitions.commit(connection)
        batch = transitions.claim(connection, owner="t", at_least=1, at_most=64, lease_s=60)
        lease = queries.load_lease(connection, batch, vocabulary=208, kinds=KINDS, max_tokens=16)
        assert not lease.corrupt
        return lease.rows


def replies(batch: Batch, pairs: list[tuple[int, int]]) -> list[tuple[list[int], list[int]]]:
    both = [[batch.sequences[place].token_actions.tolist() for place in pair] for pair in pairs]
    return [(better, worse) for better, worse in both]


def test_ratings_corrections_and_preferences_become_places_in_the_batch(either, model):
    ledger = either
    for number, name in enumerate("abcd"):
        record(ledger, name, [10 + number, END])
    say(ledger, "a", rating="up", preferred_over="b")
    say(ledger, "b", rating="down")
    say(ledger, "c", correction="w1 w2")
    rows = leased(ledger)
    answers = answer_tokenizer(TrainerConfig(algorithm="sft"), model, vocabulary=208, context=256)
    rows = unpack_rows(pack_rows(answers.with_corrections(rows)))  # as they come to another rank
    batch = make_batch(rows)
    assert [row.msg_id for row in rows] == ["a", "b", "c"], "nothing was said of d"
    assert batch.ratings == {0: True, 1: False}
    assert batch.written == [3]
    written = batch.sequences[3]
    assert written.token_ids.tolist() == [1, 4, 9, 9, 10, END] and written.actions.tolist() == [3, 4, 5]
    assert written.masked.all(), "nobody sampled it"
    assert batch.pairs == [(0, 1), (3, 2)]
    assert batch.unused == {}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"batch_size": 2, "max_trajectory_rows": 2}, [[False, False], [False, True]]),
        ({"batch_size": 4, "max_trajectory_tokens": 5}, [[False, False, False]]),
    ],
)
def test_a_correction_of_a_whole_is_for_its_last_reply_also_if_that_is_claimed_later_or_never(
    settings, expected, ledger, model
):
    for number in range(3):
        record(ledger, f"m{number}", [10 + number, END], task_id="t", run_id="0")
    record(ledger, "last", [20, 21, 22, END], task_id="t", run_id="0")
    with ledger.write() as connection:
        about: dict[str, Any] = {"msg_ids": (), "rule": RewardConfig(), "learned": frozenset(KINDS)}
        said = [Signal("correction", text="w1 w2")]
        transitions.apply_feedback(connection, task_id="t", run_id="0", signals=said, **about)
        transitions.commit(connection)
    answers = answer_tokenizer(TrainerConfig(algorithm="sft"), model, vocabulary=208, context=256)
    config = TrainerConfig(algorithm="sft", poll_interval_s=0.02, **settings)
    claimer = Claimer(ledger, config, StopRequest(), 208, answers=answers)
    assert [[row.correction is not None for row in claimer.next().rows] for _ in expected] == expected


@pytest.mark.parametrize("state", ["RECORDED", "CONSUMED", "DISCARDED", "LEASED"])
def test_the_other_reply_is_read_in_whatever_state_it_is_and_stays_as_it_is(ledger, state):
    record(ledger, "other", [10, END])
    record(ledger, "better", [11, END])
    with ledger.write() as connection:
        connection.execute(update(experiences).where(experiences.c.msg_id == "other").values(state=state))
    say(ledger, "better", preferred_over="other")
    (row,) = leased(ledger)
    batch = make_batch(unpack_rows(pack_rows([row])))
    assert replies(batch, batch.pairs) == [([11, END], [10, END])]
    assert batch.members == [[0]], "what was only read is of no trajectory"
    with ledger.read() as connection:
        assert connection.execute(select(experiences.c.state).order_by(experiences.c.id)).scalars().all() == [
            state,
            "LEASED",
        ]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"a": "a"}, {"preference_of_itself": 1}),
        ({"a": "elsewhere"}, {"preference_other_prompt": 1}),
        ({"a": "nobody"}, {"preference_unknown": 1}),
        ({"a": "a#7"}, {"preference_unknown": 1}),
        ({"a": "theirs"}, {"preference_unknown": 1}),
        ({"a": "erased"}, {"preference_unknown": 1}),
        ({"a": "broken"}, {"preference_unknown": 1}),
        ({"a": "foreign"}, {"preference_unknown": 1}),
        ({"a": "long"}, {"preference_unknown": 1}),
        ({"a": "same"}, {"preference_of_equals": 1}),
        ({"a": "b", "b": "a"}, {"preference_circle": 2}),
        ({"a": "b", "b": "c", "c": "a"}, {"preference_circle": 3}),
    ],
)
def test_a_preference_that_cannot_teach_is_counted_and_leaves_the_row_to_its_other_signals(ledger, said, expected):
    for number, name in enumerate("abc"):
        record(ledger, name, [10 + number])
    record(ledger, "elsewhere", [20], [1, 4, 8])
    record(ledger, "theirs", [21], key_group="shop")
    record(ledger, "same", [10])
    record(ledger, "foreign", [70_000])
    record(ledger, "long", list(range(20, 40)))
    for name in ("erased", "broken"):
        record(ledger, name, [22])
    with ledger.write() as connection:
        ids = dict(connection.execute(select(experiences.c.msg_id, experiences.c.id)).all())
        connection.execute(payloads.delete().where(payloads.c.experience_id == ids["erased"]))
        broken = payloads.c.experience_id == ids["broken"]
        connection.execute(payloads.update().where(broken).values(tokens=b"nothing"))
    say(ledger, "a", rating="up")
    for name, other in said.items():
        say(ledger, name, preferred_over=other)
    batch = make_batch(leased(ledger))
    assert batch.pairs == [] and batch.unused == expected
    assert batch.ratings == {0: True}


def test_a_preference_beside_a_circle_teaches(ledger):
    for number, name in enumerate("abc"):
        record(ledger, name, [10 + number])
    for name, other in (("a", "b"), ("b", "a"), ("c", "a")):
        say(ledger, name, preferred_over=other)
    batch = make_batch(leased(ledger))
    assert replies(batch, batch.pairs) == [([12], [10])]
    assert batch.unused == {"preference_circle": 2}


@pytest.mark.parametrize("circle", ["ba", "abc"])
def test_the_rest_of_a_circle_is_found_in_rows_that_are_trained_already(ledger, circle):
    for number, name in enumerate(circle):
        record(ledger, name, [10 + number])
    for number, name in enumerate(circle[:-1]):
        say(ledger, name, preferred_over=circle[number + 1])
        leased(ledger)
    say(ledger, circle[-1], preferred_over=circle[0])
    assert make_batch(leased(ledger)).unused == {"preference_circle": 1}


def test_one_choice_is_preferred_over_the_others_of_its_message(ledger):
    with ledger.write() as connection:
        three = [replace(sample("m", tokens=tokens([10 + n])), choice=n) for n in range(3)]
        transitions.record(connection, three)
    say(ledger, "m#1", preferred_over="m")
    batch = make_batch(leased(ledger))
    assert replies(batch, batch.pairs) == [([11], [10]), ([11], [12])]


def conversation(ledger: Ledger) -> None:
    """Two turns that merge."""
    record(ledger, "first", [10, END])
    record(ledger, "second", [11, END], [1, 4, 9, 10, END, 5])
    with ledger.write() as connection:
        connection.execute(update(experiences).values(conversation_id="first"))


def test_what_is_said_of_a_turn_is_about_its_reply_alone(ledger):
    conversation(ledger)
    record(ledger, "other", [12, END])
    say(ledger, "first", rating="down")
    say(ledger, "second", rating="up")
    say(ledger, "other", preferred_over="first")
    batch = make_batch(leased(ledger))
    merged, *_ = batch.sequences
    assert len(merged.ends) == 2 and 0 not in batch.ratings
    said = {tuple(batch.sequences[place].token_actions): up for place, up in batch.ratings.items()}
    assert said == {(10, END): False, (11, END): True}
    assert replies(batch, batch.pairs) == [([12, END], [10, END])]


def test_what_is_said_of_a_whole_is_about_all_that_was_sampled_in_it(ledger):
    conversation(ledger)
    say(ledger, "first", "second", rating="up")
    batch = make_batch(leased(ledger))
    assert batch.ratings == {0: True} and len(batch.sequences) == 1
    assert batch.sequences[0].token_actions.tolist() == [10, END, 11, END]


def test_a_demonstration_is_a_written_answer_and_earns_what_it_is_given(ledger):
    record(ledger, "shown", [10, END])
    record(ledger, "sampled", [11, END])
    say(ledger, "shown", demonstration="")
    say(ledger, "sampled", rating="up")
    batch = make_batch(leased(ledger))
    assert batch.written == [0] and batch.ratings == {1: True}
    assert batch.rewarded == [1]


@pytest.mark.parametrize("ready", [False, True])
def test_an_algorithm_that_nobody_speaks_to_says_once_which_signals_there_are_and_waits(ready, ledger, caplog):
    """Also while rows that another algorithm learns from wait for a whole batch."""
    caplog.set_level("INFO", logger="flywheel")
    record(ledger, "a", [10])
    say(ledger, "a", rating="up", comment="why?")
    if ready:
        with ledger.write() as connection:
            transitions.commit(connection)
    asked = {"algorithms": {"dpo": 1, "kto": 1}, "poll_interval_s": 0.01, "batch_size": 2}
    config = TrainerConfig.model_validate(asked)
    stop = StopRequest()
    claimer = Claimer(ledger, config, stop)
    waiting = threading.Thread(target=claimer.next)
    waiting.start()
    wait_until(lambda: "nothing is said" in caplog.text)
    stop.set()
    waiting.join()
    told = [one.getMessage() for one in caplog.records if "nothing is said" in one.getMessage()]
    (line,) = told
    assert "algorithm=dpo" in line and "correction" in line and "kinds='comment: 1, rating: 1'" in line


def test_metrics_without_weights_are_named_to_who_forgot_the_weights(ledger, caplog, monkeypatch):
    caplog.set_level("INFO", logger="flywheel")
    monkeypatch.setattr(claim, "WARN_EVERY_S", 0.02)
    stop = StopRequest()
    config = TrainerConfig.model_validate({"algorithm": "reinforce_pp", "poll_interval_s": 0.01})
    waiting = threading.Thread(target=Claimer(ledger, config, stop, rule=RewardConfig()).next)
    waiting.start()
    wait_until(lambda: "waiting for commits" in caplog.text)
    record(ledger, "a", [10])
    with ledger.write() as connection:
        quality = [Signal("metric", value=1.0, name="quality")]
        given = {"rule": RewardConfig(), "learned": SCORES, "task_id": None, "run_id": None}
        transitions.apply_feedback(connection, msg_ids=["a"], signals=quality, **given)
    wait_until(lambda: "nothing is said" in caplog.text)
    stop.set()
    waiting.join()
    assert "kinds='metric without weights (reward.metrics): 1'" in caplog.text


def test_only_what_an_algorithm_learns_from_is_read():
    assert TrainerConfig(algorithm="kto").learns_from == {"rating"}
    assert TrainerConfig(algorithm="sft").learns_from == {"correction", "demonstration"}
    assert TrainerConfig(algorithms={"dpo": 1, "kto": 1}).learns_from == {"rating", "correction", "preferred_over"}
