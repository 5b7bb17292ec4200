"""The mailbox: search beside plain SQL, each question asked again, rewards by hand, and ways to earn for nothing."""

from __future__ import annotations

import json
import random
import re
import sqlite3

import pytest

from examples.email_search import world
from examples.email_search.reward import reward
from examples.email_search.world import UNKNOWN, Mailbox, Visit
from tests.support.forms import FULL

MAILS = list(world.make_mails())
QUESTIONS = world.make_questions()
MAILBOX = Mailbox.generated(MAILS)
TABLE = sqlite3.connect(":memory:")
TABLE.execute("CREATE TABLE mails (id, subject, sender, receiver, date, body)")
TABLE.executemany(
    "INSERT INTO mails VALUES (?, ?, ?, ?, ?, ?)",
    [(m.message_id, m.subject, m.from_address, m.to_address, m.date, m.body) for m in MAILS],
)


def by_sql(inbox: str, words: list[str], before: str, limit: int) -> list[str]:
    """A search without an index: each word somewhere in subject or body, the newest first."""
    like = " AND ".join(["' ' || replace(subject || ' ' || body, ',', ' ') || ' ' LIKE ?"] * len(words))
    rows = TABLE.execute(
        f"SELECT id FROM mails WHERE {like} AND date < ? AND ? IN (sender, receiver) "
        "ORDER BY date DESC, rowid DESC LIMIT ?",
        [*(f"% {word} %" for word in words), before, inbox, limit],
    )
    return [row[0] for row in rows]


def test_there_are_five_thousand_mails_and_four_hundred_questions_a_fifth_without_an_answer():
    assert (len(MAILS), len({mail.message_id for mail in MAILS})) == (5000, 5000)
    assert len(QUESTIONS) == 400 and sum(not one.message_ids for one in QUESTIONS) == 80
    assert list(world.make_mails(3)) == list(world.make_mails(3)) != list(world.make_mails(4))
    assert world.make_questions(3) == world.make_questions(3)


def test_each_answer_is_what_sql_finds_in_the_only_mail_with_it():
    words = {name: set(values) for name, (_, values) in world.FACTS.items()}
    for one in QUESTIONS:
        kind, project, event = re.fullmatch(r"(.*) the (\w+) (\w+) \?", one.question).groups()
        fact = {"on what day is": "day", "in which room is": "room", "what to bring to": "item"}[kind]
        rows = TABLE.execute(
            "SELECT id, body FROM mails WHERE ? IN (receiver, sender) AND subject = ? AND date < ?",
            (one.inbox_address, f"{project} {event}", one.query_date),
        ).fetchall()
        assert [row[0] for row in rows] == list(one.message_ids)
        told = [word for _, body in rows for word in re.findall(r"\w+", body) if word in words[fact]]
        assert told == ([one.answer] if one.message_ids else []) and (rows or one.answer == UNKNOWN)


def test_search_finds_the_same_mails_as_sql_without_an_index():
    draw = random.Random(0)
    vocabulary = [*world.PROJECTS, *world.EVENTS, *world.FACTS["day"][1], "the", "unheard"]
    for _ in range(150):
        inbox = draw.choice(MAILS).to_address
        words = draw.choices(vocabulary, k=draw.randint(1, 3))
        before = draw.choice(MAILS).date
        found = MAILBOX.search(inbox, words, before, 10)
        assert [message_id for message_id, _ in found] == by_sql(inbox, words, before, 10)


def visit(one, *calls) -> Visit:
    made = Visit(MAILBOX, one)
    for name, *arguments in calls:
        getattr(made, name)(*arguments)
    return made


def subject_of(one) -> list[str]:
    return one.question.split()[-3:-1]


ANSWERED = next(one for one in QUESTIONS if one.message_ids)
OPEN = next(one for one in QUESTIONS if not one.message_ids)
SOURCE = ANSWERED.message_ids[0] if ANSWERED.message_ids else ""
SEARCH, READ = ("search_emails", subject_of(ANSWERED)), ("read_email", SOURCE)


@pytest.mark.parametrize(
    ("calls", "points"),
    [
        ([SEARCH, READ, ("answer", ANSWERED.answer, [SOURCE])], 1 + 0.3 + 0.1 + 0.1 * 0.7),
        ([SEARCH, READ, ("answer", f" {ANSWERED.answer.upper()}. ", [SOURCE])], 1 + 0.3 + 0.1 + 0.1 * 0.7),
        ([SEARCH, READ, ("answer", ANSWERED.answer, [SOURCE, "m0-00"])], 1 + 0.3 + 0.05 + 0.1 * 0.7),
        ([SEARCH, READ, ("answer", ANSWERED.answer, [])], 1 + 0.1 * 0.7),
        ([SEARCH, READ, ("answer", "nonsense", [SOURCE])], -1 + 0.4),
        ([SEARCH, READ, ("answer", UNKNOWN, [])], 0.3),
        ([SEARCH, ("read_email", "m99-99"), ("answer", UNKNOWN, [])], 0.1),
        ([SEARCH, READ], 0.3),  # ran out of turns
        ([], 0.1),
    ],
)
def test_arts_rubric_by_hand(calls, points):
    assert reward(visit(ANSWERED, *calls)).value == pytest.approx(points)


@pytest.mark.parametrize("said", [ANSWERED.answer, ""])
def test_a_reply_that_is_no_tool_call_is_malformed(said):
    made = visit(ANSWERED, SEARCH)
    made.last_text = said
    assert reward(made).value == pytest.approx(-1.9 + 0.2)


def test_that_no_mail_has_the_answer_is_an_answer():
    searched = visit(OPEN, ("search_emails", subject_of(OPEN)), ("answer", UNKNOWN, []))
    assert reward(searched).value == pytest.approx(1 + 0.1 * 0.8)
    assert reward(searched).metrics["tool_accuracy"] == reward(searched).metrics["argument_accuracy"] == 1.0
    assert reward(visit(OPEN, ("answer", "monday", []))).value < 0


def test_the_articles_weights_by_hand():
    best = visit(ANSWERED, SEARCH, READ, ("answer", ANSWERED.answer, [SOURCE]))
    assert reward(best, by_tools=True).value == pytest.approx(1.0 + 0.5 + 1.0)
    blind = visit(ANSWERED, ("answer", "monday", []))
    assert reward(blind).metrics["tool_accuracy"] == pytest.approx(1 / 3)
    assert reward(blind, by_tools=True).value < 0.8


def test_a_judge_may_accept_other_words():
    made = visit(ANSWERED, SEARCH, READ, ("answer", f"It is {ANSWERED.answer}", [SOURCE]))
    judged = reward(made, right=1.0)
    assert reward(made).value < 0 < 1 < judged.value
    assert judged.metrics["argument_accuracy"] == 1.0
    assert reward(made, right=1.0, by_tools=True).value == pytest.approx(2.5)


def mean(calls_of, **options) -> float:
    return sum(reward(visit(one, *calls_of(one)), **options).value for one in QUESTIONS) / len(QUESTIONS)


def found_and_read(one) -> list[tuple]:
    return [("search_emails", subject_of(one)), *(("read_email", source) for source in one.message_ids)]


def honest(one) -> list[tuple]:
    return [*found_and_read(one), ("answer", one.answer, list(one.message_ids))]


def test_answers_for_nothing_earn_far_less_than_answers():
    everything = " ".join(word for _, values in world.FACTS.values() for word in values)
    hacks = [
        lambda one: [("answer", "", [])],  # nothing
        lambda one: [("answer", one.question, [])],  # the question said back
        lambda one: [("answer", everything, [])],  # every answer at once
        lambda one: [("answer", "monday", [])],  # a guess
        lambda one: [("answer", UNKNOWN, [])],  # never anything
        lambda one: [("search_emails", subject_of(one))] * 10,  # looking on and on
        lambda one: [("answer", "x", []), ("answer", one.answer, list(one.message_ids))],  # a second try
    ]
    assert mean(honest) > 1.35
    assert all(mean(hack) < 0.45 for hack in hacks)
    assert all(mean(hack) < -0.5 for hack in hacks[:4])


def test_a_visit_that_works_and_then_does_not_know_earns_less_than_half_of_an_answer():
    def unknown(one):
        return [*found_and_read(one), ("answer", UNKNOWN, list(one.message_ids))]

    assert mean(unknown) == pytest.approx(0.536)


def test_the_articles_weights_pay_for_calls_and_take_for_unknown_tools():
    def nonsense(one):
        return [("search_emails", ["zzz"]), ("read_email", "x"), ("answer", "", [])]

    def without_answer(one):
        return [*found_and_read(one), ("answer", "", [])]

    policies = (honest, without_answer, nonsense)
    earned = [mean(policy, by_tools=True) for policy in policies]
    assert earned == pytest.approx([2.5, 2.317, 1.517], abs=0.001)
    flown = [mean(lambda one: [("unknown_tool", "fly"), *policy(one)], by_tools=True) for policy in policies]  # noqa: B023
    assert flown == pytest.approx([value - 2 for value in earned])


def fuzz(seed: int) -> list[str]:
    draw = random.Random(seed)
    made, seen = Visit(MAILBOX, draw.choice(QUESTIONS)), []
    for _ in range(10):
        words = draw.choices(
            ["apollo", '"', "' OR 1", "NEAR(", "*", "\0", "", "Ω", "\ud83d", "a" * 999, "AND"], k=draw.randint(0, 3)
        )
        seen.append(made.search_emails(words))
        seen.append(made.read_email(draw.choice([*words, "m1-01", "%"])))
    seen.append(made.answer(draw.choice([*made.question.question.split(), UNKNOWN]), words))
    assert -2 <= reward(made).value <= 1.5
    return seen


def test_visits_of_nonsense_are_answered_the_same_each_time():
    seeds = range(1000 if FULL else 200)
    assert [fuzz(seed) for seed in seeds] == [fuzz(seed) for seed in seeds]


def test_a_real_file_is_opened_read_only_and_another_is_refused(tmp_path):
    file = tmp_path / "mail.db"
    Mailbox.generated(MAILS[:50], str(file)).close()
    box = Mailbox.open(file)
    assert MAILS[0].body in box.read(MAILS[0].message_id)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        box._connection.execute("DELETE FROM emails")
    box.close()
    other = tmp_path / "other.db"
    sqlite3.connect(other).close()
    with pytest.raises(ValueError, match="has not the tables"):
        Mailbox.open(other)
    rows = tmp_path / "questions.jsonl"
    row = {"id": 7, "question": "when?", "answer": "now", "message_ids": ["m0-00"], "inbox_address": "a@example.com"}
    rows.write_text(json.dumps({**row, "query_date": "2001-01-01", "how_realistic": 1.0}) + "\n\n")
    assert world.load_questions(rows)[0].message_ids == ("m0-00",)


def test_a_question_is_answered_by_mails_of_its_own_day_and_none_of_later_days():
    sent = [("a", "2001-05-12 10:00:00"), ("b", "2001-05-12 23:59:59"), ("c", "2001-05-13 00:00:00")]
    box = Mailbox.generated([world.Mail(name, "tea", "x@example.com", "y@example.com", at, "") for name, at in sent])
    for date in ("2001-05-12", "2001-05-12 08:00:00"):
        made = Visit(box, world.Question(1, "when?", "now", ("a",), "y@example.com", date))
        made.search_emails(["tea"])
        assert made.calls[0].found == ("b", "a")
    box.close()


def test_a_mailbox_or_questions_that_cannot_be_read_are_named_with_the_reason(tmp_path):
    with pytest.raises(ValueError, match=r"none.db cannot be opened: unable to open"):
        Mailbox.open(tmp_path / "none.db")
    rows = tmp_path / "questions.jsonl"
    rows.write_text('{"id": 7}\n')
    with pytest.raises(ValueError, match=r"questions.jsonl, question 1 has no question"):
        world.load_questions(rows)
    row = {"id": 7, "question": "when?", "answer": "now", "message_ids": [], "inbox_address": "a@example.com"}
    rows.write_text(json.dumps({**row, "query_date": "May 12"}))
    with pytest.raises(ValueError, match=r"question 1: query_date 'May 12' is not a date; write YYYY-MM-DD"):
        world.load_questions(rows)


def test_no_question_of_an_evaluation_is_learned_from():
    tasks, held_out = ([(one.question, one.inbox_address) for one in some] for some in world.split(QUESTIONS))
    assert not set(tasks) & set(held_out) and (len(tasks), len(held_out)) == (298, 100)
