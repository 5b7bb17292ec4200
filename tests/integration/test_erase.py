"""Erasing: nothing readable is left, what was trained on is named, and a trainer never meets an empty row."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import func, select, update

from services.commands.erase import _ranges
from shared.errors import ConfigError
from shared.ledger import queries, transitions
from shared.ledger.conditions import split_name
from shared.ledger.dataset import conversations
from shared.ledger.tables import experiences, idempotency, lineage, payloads, signals
from shared.reward import Signal
from tests.support.lessons import COMMENT, UP, claim, commit, publish, record, say, stands
from tests.support.processes import run_here


def chats(explorer, task: str, count: int) -> list[str]:
    ids = [explorer.chat(metadata={"task_id": task}).json()["id"] for _ in range(count)]
    explorer.http.post("/feedback", json={"msg_ids": ids, "reward": 1, "comment": "private"})
    return ids


def test_an_erased_task_leaves_nothing_to_read_and_names_its_versions(explorer, capsys):
    gone, kept = chats(explorer, "gone", 3), chats(explorer, "kept", 2)
    explorer.http.post("/commit")
    with explorer.ledger.write() as connection:
        batch = transitions.claim(connection, owner="t", at_least=1, at_most=1, lease_s=60)
        transitions.announce_trainer(connection, name="t", step=0, version=0, state_path=None, state_sha256=None)
        transitions.publish(
            connection, version=1, parent=0, kind="full", step=1, trainer="t", batch_ids=[batch], state_path="x"
        )
        leased = transitions.claim(connection, owner="t", at_least=1, at_most=1, lease_s=60)
    assert run_here(explorer.config, "erase", "--task", "gone") == 0
    assert "3 rows erased; they went into versions 1" in capsys.readouterr().out
    with explorer.ledger.read() as connection:
        left = connection.execute(select(experiences.c.msg_id).join(payloads)).scalars().all()
        said = set(connection.execute(select(signals.c.msg_id)).scalars())
        states = dict(connection.execute(select(experiences.c.msg_id, experiences.c.state)).all())
    assert set(left) == said == set(kept)
    assert [states[name] for name in gone] == ["CONSUMED", "LEASED", "DISCARDED"]
    with explorer.ledger.write() as connection:
        assert list(queries.load_lease(connection, leased).corrupt.values()) == ["its tokens were erased"]


def test_rows_that_are_leased_during_an_erasure_are_counted_and_named_by_a_repeat(config, ledger, capsys):
    record(ledger, "m", task_id="t")
    say(ledger, "m", UP)
    commit(ledger)
    lease = claim(ledger)
    assert run_here(config, "erase", "--task", "t") == 0
    assert "no version was trained on them" not in capsys.readouterr().out
    publish(ledger, lease, 1)
    assert run_here(config, "erase", "--task", "t") == 0
    assert "1 rows erased; they went into versions 1" in capsys.readouterr().out


@pytest.mark.parametrize(("preferred", "name", "erased"), [(0, "m", 1), (0, "m#1", 1), (1, "m#0", 0), (1, "m", 0)])
def test_a_reply_over_which_a_trained_one_was_preferred_names_that_version(
    ledger, config, capsys, preferred, name, erased
):
    record(ledger, "m")
    record(ledger, "m", choice=1)
    with ledger.write() as connection:
        said = {
            "signals": [Signal("preferred_over", text=name)],
            "rule": config.reward,
            "task_id": None,
            "run_id": None,
        }
        transitions.apply_feedback(
            connection, msg_ids=[f"m#{preferred}"], learned=frozenset(("preferred_over",)), **said
        )
    commit(ledger)
    lease = claim(ledger)
    assert run_here(config, "erase", "--message", f"m#{erased}") == 0
    assert "a trainer has leased 1 of them, or of replies that are preferred over them" in capsys.readouterr().out
    publish(ledger, lease, 1)
    assert run_here(config, "erase", "--message", f"m#{erased}") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 rows erased; they went into versions 1"


def test_a_choice_has_one_name_by_which_an_erasure_finds_what_was_preferred_over_it():
    assert split_name("m#1") == ("m", 1)
    assert split_name("m#0") == ("m", 0)
    assert split_name("m#01") == ("m#01", None)


def test_an_erasure_names_whose_rows(explorer):
    chats(explorer, "t", 1)
    with pytest.raises(ConfigError, match="choose the rows"):
        run_here(explorer.config, "erase")
    with explorer.ledger.read() as connection:
        assert connection.execute(select(func.count()).select_from(payloads)).scalar() == 1


def test_ranges_by_hand():
    assert _ranges({1, 2, 3, 7, 9, 10}) == "versions 1-3, 7, 9-10"


def test_an_erased_message_is_in_no_file_and_no_later_turn_quotes_it(scripted_engine, start_explorer, database_url):
    explorer = start_explorer([scripted_engine.url]).wait_ready()
    secret = "the-secret-of-a-customer"
    said = [{"role": "user", "content": secret}]
    first = explorer.chat(messages=said, metadata={"task_id": "t"}).json()
    for _ in range(2):
        said += [{"role": "assistant", "content": "answer 0 of start"}, {"role": "user", "content": "go on"}]
        explorer.chat(messages=said, metadata={"task_id": "t"})
    explorer.http.post("/feedback", json={"msg_ids": [first["id"]], "comment": secret})
    explorer.http.post("/feedback", json={"task_id": "t", "rating": "up"}, headers={"Idempotency-Key": "k"})
    assert run_here(explorer.config, "erase", "--message", first["id"]) == 0
    with explorer.ledger.read() as connection:
        requests = connection.execute(select(payloads.c.request)).scalars().all()
        assert requests == [None, None]
        assert connection.execute(select(func.count()).select_from(idempotency)).scalar() == 0
    if database_url is None:
        files = list(explorer.config.root.glob("ledger.sqlite3*"))
        assert len(files) > 1, "the log exists while the explorer has the ledger open"
        assert not [file for file in files if secret.encode() in file.read_bytes()]


def test_chats_go_on_while_an_erasure_waits_for_a_reader(explorer):
    with ThreadPoolExecutor(1) as thread:
        with explorer.ledger.read() as connection:
            assert connection.execute(select(experiences.c.id)).all() == []
            chats(explorer, "t", 1)  # the reader needs the log of what is newer than its snapshot
            emptied = thread.submit(explorer.ledger.empty_log)
            assert [explorer.chat().status_code for _ in range(20)] == [200] * 20
            assert emptied.done() is not explorer.ledger.is_sqlite
        assert emptied.result()


def test_another_choice_keeps_the_request_when_the_one_it_is_stored_with_is_removed(explorer):
    explorer.chat(n=3)
    with explorer.ledger.write() as connection:
        rows = connection.execute(select(experiences.c.id).order_by(experiences.c.id)).scalars().all()
        connection.execute(update(experiences).where(experiences.c.id == rows[0]).values(state="CONSUMED"))
        assert len(transitions.remove(connection, rows)) == 1
    with explorer.ledger.read() as connection:
        assert [row["messages"][0]["content"] for row in conversations(connection, [])] == ["hi", "hi"]
        stored = connection.execute(select(payloads.c.request).order_by(payloads.c.experience_id)).scalars().all()
    assert [one is not None for one in stored] == [True, False]


def test_an_erased_run_of_one_choice_leaves_the_feedback_and_the_texts_of_the_others(explorer):
    msg_id = explorer.chat(n=3).json()["id"]
    for choice in range(3):
        run = {"task_id": "t", "run_id": f"{choice}"}
        explorer.http.post("/feedback", json={"msg_ids": [f"{msg_id}#{choice}"], "comment": "private", **run})
    for left in ([1, 2], [2]):
        assert run_here(explorer.config, "erase", "--task", "t", "--run", str(left[0] - 1)) == 0
        with explorer.ledger.read() as connection:
            assert connection.execute(select(signals.c.choice).order_by(signals.c.choice)).scalars().all() == left
            assert [row["choice"] for row in conversations(connection, []) if row is not None] == left


def test_one_choice_is_erased_by_the_name_that_runs_and_feedback_have_for_it(ledger, config):
    record(ledger, "m")
    record(ledger, "m", choice=1)
    assert run_here(config, "erase", "--message", "m#1") == 0
    assert stands(ledger, "choice", "state") == [(0, "RECORDED"), (1, "DISCARDED")]


def test_a_leased_row_that_is_erased_waits_for_no_comment_that_comes_after_it(ledger):
    record(ledger, "m")
    say(ledger, "m", UP, COMMENT)
    commit(ledger)
    lease = claim(ledger)
    with ledger.write() as connection:
        transitions.erase(connection, msg_id="m")
    assert say(ledger, "m", Signal("comment", text="later")) == "already_trained"
    publish(ledger, lease, 1)
    assert commit(ledger) == 0
    assert stands(ledger, "state", "teaches", "consumed_version") == [("CONSUMED", 0, 1)]


def erased_message(config, capsys, name: str) -> str:
    assert run_here(config, "erase", "--message", name) == 0
    return capsys.readouterr().out.splitlines()[-1]


def serve_base(ledger) -> None:
    with ledger.write() as connection:
        transitions.publish(connection, version=0, parent=None, kind="full", step=0)
        transitions.serve_version(connection, 0, by="an engine")


def roll_back(ledger, **how) -> None:
    with ledger.write() as connection:
        transitions.roll_back(connection, 0, by="an operator", **how)


def learn(ledger, name: str, signal: Signal, version: int) -> None:
    say(ledger, name, signal)
    commit(ledger)
    publish(ledger, claim(ledger), version)


def test_every_version_that_was_trained_on_a_row_is_named_whatever_happened_to_the_row_since(config, ledger, capsys):
    serve_base(ledger)
    record(ledger, "m")
    learn(ledger, "m", UP, 1)
    roll_back(ledger)
    learn(ledger, "m", COMMENT, 2)
    learn(ledger, "m", Signal("correction", text="yes"), 3)
    say(ledger, "m", Signal("comment", text="shorter"))
    commit(ledger)
    claim(ledger)
    with ledger.write() as connection:
        assert transitions.give_back(connection, owner="t") == 1
    assert erased_message(config, capsys, "m") == "1 rows erased; they went into versions 1-3"


def test_a_version_whose_batch_lost_the_row_is_not_named(config, ledger, capsys):
    record(ledger, "m", "n")
    say(ledger, "m", UP)
    commit(ledger)
    claim(ledger)
    assert "a trainer has leased 1 of them" in erased_message(config, capsys, "m")
    with ledger.write() as connection:
        transitions.give_back(connection, owner="t")
    say(ledger, "n", UP)
    commit(ledger)
    lease = claim(ledger)
    assert list(lease.corrupt.values()) == ["its tokens were erased"]
    with ledger.write() as connection:
        transitions.quarantine(connection, lease.corrupt)
    publish(ledger, lease, 1)
    assert erased_message(config, capsys, "m") == "1 rows erased; no version was trained on them"
    assert erased_message(config, capsys, "n") == "1 rows erased; they went into versions 1"


def test_a_rejected_version_is_named_although_its_rows_are_to_be_trained_on_again(config, ledger, capsys):
    serve_base(ledger)
    record(ledger, "m")
    learn(ledger, "m", UP, 1)
    roll_back(ledger, again=True)
    assert stands(ledger, "state", "consumed_version") == [("READY", None)]
    assert erased_message(config, capsys, "m") == "1 rows erased; they went into versions 1"


def test_a_version_published_ahead_of_a_state_and_withdrawn_is_named(config, ledger, capsys):
    serve_base(ledger)
    record(ledger, "m", "n")
    say(ledger, "m", UP)
    commit(ledger)
    lease = claim(ledger)
    with ledger.write() as connection:
        about = {"parent": 0, "kind": "full", "step": 1, "trainer": "t"}
        transitions.announce_trainer(connection, name="t", step=0, version=0, state_path=None, state_sha256=None)
        assert transitions.reserve_version(connection, writer="t") == 1
        transitions.publish_ahead(connection, version=1, trained_on=[row.id for row in lease.rows], **about)
        transitions.give_back(connection, owner="t")
        transitions.withdraw_versions(connection, writer="t", after=0)
    assert erased_message(config, capsys, "m") == "1 rows erased; they went into versions 1"
    assert erased_message(config, capsys, "n") == "1 rows erased; no version was trained on them"


def test_the_version_of_a_trainer_that_an_older_flywheel_started_is_named(config, ledger, capsys):
    record(ledger, "m")
    learn(ledger, "m", UP, 1)
    with ledger.write() as connection:
        connection.execute(lineage.delete())
    assert erased_message(config, capsys, "m") == "1 rows erased; they went into versions 1"


def test_a_removed_row_leaves_no_lineage(ledger):
    record(ledger, "m", "n")
    for name, version in (("m", 1), ("n", 2)):
        learn(ledger, name, UP, version)
    with ledger.write() as connection:
        (removed,) = transitions.remove(connection, [1])
        left = connection.execute(select(lineage.c.experience_id, lineage.c.version)).all()
    assert (removed, left) == (1, [(2, 2)])
