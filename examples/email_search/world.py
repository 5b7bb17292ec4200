"""A mailbox in SQLite with full-text search, in the schema of ART's email agent. Pure; independent of any model.

`make_mails` and `make_questions` generate a mailbox: 5,000 mails of 25 people, and 400 questions. No mail answers a
fifth of the questions. `Mailbox.open` opens a real file of the same schema instead, such as ART's Enron mails.
"""

from __future__ import annotations

import json
import random
import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path

MAILS, QUESTIONS, PEOPLE = 5000, 400, 25
UNANSWERABLE = 5  # one question in this many has no answer
MOST_FOUND = 10
UNKNOWN = "I don't know"
TODAY = datetime(2024, 1, 1)
PROJECTS = (
    "apollo", "borneo", "cobalt", "delta", "ember", "falcon", "garnet", "harbor", "indigo", "jasper",
    "krypton", "lotus", "meteor", "nectar", "onyx", "pluto", "quartz", "raven", "saturn", "topaz",
    "umbra", "velvet", "willow", "xenon", "yonder", "zephyr", "amber", "bronze", "coral", "dune",
)  # fmt: skip
EVENTS = ("meeting", "review", "dinner", "workshop", "audit", "launch", "flight", "party", "interview", "rehearsal")
FACTS = {
    "day": ("on what day is", ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")),
    "room": (
        "in which room is",
        ("attic", "cellar", "garden", "library", "kitchen", "studio", "gallery", "lobby"),
    ),
    "item": (
        "what to bring to",
        ("laptop", "badge", "notebook", "charger", "passport", "umbrella", "camera", "ticket"),
    ),
}
SCHEMA = """
CREATE TABLE emails (id INTEGER PRIMARY KEY AUTOINCREMENT, message_id TEXT UNIQUE, subject TEXT, from_address TEXT,
  date TEXT, body TEXT, file_name TEXT);
CREATE TABLE recipients (email_id INTEGER, recipient_address TEXT, recipient_type TEXT,
  FOREIGN KEY(email_id) REFERENCES emails(id) ON DELETE CASCADE);
CREATE INDEX idx_emails_from ON emails(from_address);
CREATE INDEX idx_emails_date ON emails(date);
CREATE INDEX idx_recipients_email_id ON recipients(email_id);
CREATE INDEX idx_recipients_address_email ON recipients(recipient_address, email_id);
CREATE VIRTUAL TABLE emails_fts USING fts5(subject, body, content='emails', content_rowid='id');
CREATE TRIGGER emails_ai AFTER INSERT ON emails BEGIN
  INSERT INTO emails_fts (rowid, subject, body) VALUES (new.id, new.subject, new.body); END;
"""
SEARCH = """
SELECT e.message_id, snippet(emails_fts, -1, '', '', '...', 12)
FROM emails_fts JOIN emails e ON e.id = emails_fts.rowid
WHERE emails_fts MATCH ? AND e.date < ? AND (e.from_address = ? OR EXISTS
  (SELECT 1 FROM recipients r WHERE r.email_id = e.id AND r.recipient_address = ?))
ORDER BY e.date DESC, e.id DESC LIMIT ?
"""


@dataclass(frozen=True, slots=True)
class Mail:
    """One mail. date: ISO 8601."""

    message_id: str
    subject: str
    from_address: str
    to_address: str
    date: str
    body: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a person's mail. message_ids: the mails that answer it; empty if none does.

    query_date: the day of the question, ISO 8601. Mails of later days are not found.
    """

    id: int
    question: str
    answer: str
    message_ids: tuple[str, ...]
    inbox_address: str
    query_date: str


def make_mails(seed: int = 0, mails: int = MAILS) -> Iterator[Mail]:
    """Generate the mails. A person receives at most one mail about an event of a project."""
    draw = random.Random(f"mails {seed}")
    people = [f"person{number}@example.com" for number in range(PEOPLE)]
    topics = {person: draw.sample([(p, e) for p in PROJECTS for e in EVENTS], mails // PEOPLE) for person in people}
    for number in range(mails):
        inbox = people[number % PEOPLE]
        project, event = topics[inbox][number // PEOPLE]
        day, room, item = (draw.choice(values) for _, values in FACTS.values())
        yield Mail(
            message_id=f"m{number // 100}-{number % 100:02d}",
            subject=f"{project} {event}",
            from_address=draw.choice([person for person in people if person != inbox]),
            to_address=inbox,
            date=(TODAY - timedelta(minutes=draw.randint(1, 500_000))).strftime("%Y-%m-%d %H:%M:%S"),
            body=f"the {project} {event} is on {day} in the {room} , bring your {item}",
        )


def make_questions(seed: int = 0, questions: int = QUESTIONS) -> list[Question]:
    """Generate the questions. Every fifth is about an event that no mail of the inbox mentions."""
    draw, mails = random.Random(f"questions {seed}"), list(make_mails(seed))
    about = {mail.to_address: Counter[str]() for mail in mails}
    for mail in mails:
        about[mail.to_address][mail.subject] += 1
        about[mail.from_address][mail.subject] += 1
    single = [mail for mail in mails if about[mail.to_address][mail.subject] == 1]  # in the inbox, sent or received
    found = []
    for number in range(questions):
        mail, fact = draw.choice(single), draw.choice(list(FACTS))
        subject, answer = mail.subject, fact_of(mail.body, fact)
        sources: tuple[str, ...] = (mail.message_id,)
        if number % UNANSWERABLE == UNANSWERABLE - 1:
            all_subjects = {f"{project} {event}" for project in PROJECTS for event in EVENTS}
            subject = draw.choice(sorted(all_subjects - set(about[mail.to_address])))
            answer, sources = UNKNOWN, ()
        asked = f"{FACTS[fact][0]} the {subject} ?"
        date = TODAY.strftime("%Y-%m-%d %H:%M:%S")
        found.append(Question(number, asked, answer, sources, mail.to_address, date))
    return found


def split(questions: list[Question]) -> tuple[list[Question], list[Question]]:
    """Split into training and held-out questions: the last quarter is held out, and none of it is in the rest."""
    cut = len(questions) * 3 // 4
    asked = {(one.question, one.inbox_address) for one in questions[cut:]}
    return [one for one in questions[:cut] if (one.question, one.inbox_address) not in asked], questions[cut:]


def fact_of(body: str, fact: str) -> str:
    """Return the value of a fact in a generated mail."""
    return next(word for word in body.split() if word in FACTS[fact][1])


def task_of(question: Question) -> dict[str, object]:
    """Return the question in the form that the agent gets."""
    asked = {"id": question.id, "question": question.question}
    return {**asked, "inbox": question.inbox_address, "today": question.query_date}


def day_after(date: str) -> str:
    """Return the day after a date or time, all in ISO 8601. Raises ValueError for any other text."""
    return str(datetime.fromisoformat(date).date() + timedelta(days=1))


def load_questions(file: Path) -> list[Question]:
    """Load questions from a JSONL file with the fields of Question, which are those of ART's data set.

    Raises OSError, or ValueError for any other file.
    """
    names = list(Question.__dataclass_fields__)
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    for number, row in enumerate(rows, 1):
        if missing := [name for name in names if not isinstance(row, dict) or name not in row]:
            raise ValueError(f"{file}, question {number} has no {missing[0]}")
        try:
            day_after(row["query_date"])
        except (TypeError, ValueError) as exc:
            raise ValueError(
                f"{file}, question {number}: query_date {row['query_date']!r} is not a date; write YYYY-MM-DD"
            ) from exc
    picked = [{name: row[name] for name in names} for row in rows]
    return [Question(**{**row, "message_ids": tuple(row["message_ids"])}) for row in picked]


class Mailbox:
    """Mails in SQLite. Thread-safe."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    @classmethod
    def generated(cls, mails: Iterable[Mail] | None = None, path: str = ":memory:") -> Mailbox:
        """Return a mailbox with these mails, by default the generated ones."""
        connection = sqlite3.connect(path, check_same_thread=False)
        connection.executescript(SCHEMA)
        for mail in make_mails() if mails is None else mails:
            row = asdict(mail) | {"file_name": ""}
            added = connection.execute(
                "INSERT INTO emails (message_id, subject, from_address, date, body, file_name) "
                "VALUES (:message_id, :subject, :from_address, :date, :body, :file_name)",
                row,
            )
            connection.execute("INSERT INTO recipients VALUES (?, ?, 'to')", (added.lastrowid, mail.to_address))
        connection.commit()
        return cls(connection)

    @classmethod
    def open(cls, file: Path) -> Mailbox:
        """Open a database with this schema, read-only. Raises ValueError for any other file."""
        try:
            connection = sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True, check_same_thread=False)
        except sqlite3.Error as exc:
            raise ValueError(f"{file} cannot be opened: {exc}") from exc
        try:
            connection.execute("SELECT e.message_id, e.date FROM emails_fts f JOIN emails e ON e.id = f.rowid LIMIT 1")
            connection.execute("SELECT email_id, recipient_address FROM recipients LIMIT 1")
        except sqlite3.Error as exc:
            connection.close()
            raise ValueError(f"{file} has not the tables emails, recipients and emails_fts: {exc}") from exc
        return cls(connection)

    def search(self, inbox: str, keywords: Sequence[str], before: str, limit: int) -> list[tuple[str, str]]:
        """Return ids and snippets of the inbox's mails that contain all words, newest first."""
        words = [word for keyword in keywords for word in re.findall(r"\w+", keyword)]
        if not words:
            return []
        query = " ".join(f'"{word}"' for word in words)
        with self._lock:
            return list(self._connection.execute(SEARCH, (query, before, inbox, inbox, limit)))

    def read(self, message_id: str) -> str | None:
        """Return a mail as text, or None for an unknown id."""
        asked = "SELECT subject, from_address, date, body FROM emails WHERE message_id = ?"
        known = message_id.encode("utf-8", "replace").decode()  # JSON may have half of a surrogate pair, SQLite not
        with self._lock:
            row = self._connection.execute(asked, (known,)).fetchone()
        return None if row is None else "\n".join(map(str, row))

    def close(self) -> None:
        """Close the database."""
        self._connection.close()


@dataclass(frozen=True, slots=True)
class Call:
    """A recorded tool call. ok: whether it succeeded. found: mail ids in its result."""

    name: str
    arguments: dict[str, object]
    ok: bool
    found: tuple[str, ...] = ()


class Visit:
    """The tools for one question and the record of all calls. `answer` ends the visit."""

    def __init__(self, mailbox: Mailbox, question: Question, limit: int = MOST_FOUND) -> None:
        self.question = question
        self.calls: list[Call] = []
        self.answered: tuple[str, tuple[str, ...]] | None = None
        self.last_text: str | None = None  # the message with which the agent ended; None: it ran out of turns or room
        self._mailbox = mailbox
        self._limit = limit

    def search_emails(self, keywords: Sequence[str]) -> str:
        """Return ids and snippets, one mail per line."""
        asked = self.question
        before = day_after(asked.query_date)  # mails of the question's own day count
        found = self._mailbox.search(asked.inbox_address, list(keywords), before, self._limit)
        ids = tuple(message_id for message_id, _ in found)
        self.calls.append(Call("search_emails", {"keywords": list(keywords)}, bool(found), ids))
        return "\n".join(f"{message_id} {snippet}" for message_id, snippet in found) or "nothing found"

    def read_email(self, message_id: str) -> str:
        """Return the mail."""
        mail = self._mailbox.read(message_id)
        found = () if mail is None else (message_id,)
        self.calls.append(Call("read_email", {"message_id": message_id}, mail is not None, found))
        return mail or "no such mail"

    def answer(self, answer: str, sources: Sequence[str]) -> str:
        """End the visit. Only the first answer counts."""
        if self.answered is None:
            self.calls.append(Call("answer", {"answer": answer, "sources": list(sources)}, True))
            self.answered = answer, tuple(sources)
        return "answered"

    def unknown_tool(self, name: str) -> None:
        """Record a call of a tool that does not exist."""
        self.calls.append(Call(name, {}, False))
