"""The states of versions: arrows that hold whoever is first, numbers of one writer; named leases. On both databases."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import Connection, select, update
from sqlalchemy.exc import IntegrityError

from services.trainer import begin_with
from shared.errors import ConfigError, StartupError
from shared.experience import VersionState as S
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import list_versions, wanted_versions
from shared.ledger.tables import decisions, engines, leases, versions
from shared.process import process_name
from tests.support.processes import run_here


def do(ledger: Ledger, name: str, *args, **kwargs):
    with ledger.write() as connection:
        return getattr(transitions, name)(connection, *args, **kwargs)


def publish(ledger: Ledger, *numbers: int) -> None:
    for number in numbers:
        do(ledger, "publish", version=number, parent=number - 1 if number else None, kind="full", step=number)


def serve(ledger: Ledger, version: int, engine: str = "http://e0") -> bool:
    """An engine has proven the version, and its owner says so, as a controller does."""
    served = do(ledger, "serve_version", version, by="engine e0", engine=engine)
    do(ledger, "acquire_engine", engine, "explorer")
    do(ledger, "set_engine_state", engine, "explorer", "serving", version)
    return served


def states(ledger: Ledger) -> dict[int, str]:
    with ledger.read() as connection:
        return {row.version: row.state for row in list_versions(connection)}


def decisions_in(connection: Connection, version: int) -> Sequence[Any]:
    return connection.execute(select(decisions).where(decisions.c.version == version).order_by(decisions.c.id)).all()


def list_decisions(ledger: Ledger, version: int) -> Sequence[Any]:
    return ledger.fetch(lambda connection: decisions_in(connection, version))


def arrows(made: Sequence[Any]) -> list[tuple[str | None, str]]:
    return [(one.from_state, one.to_state) for one in made]


def test_a_version_goes_from_reserved_to_retired_and_each_step_is_a_decision(ledger):
    publish(ledger, 0)
    assert do(ledger, "reserve_version", writer="trainer") == 1
    assert states(ledger)[1] == S.RESERVED
    do(ledger, "publish", version=1, parent=0, kind="full", step=1, trainer="trainer")
    assert serve(ledger, 1)
    publish(ledger, 2)
    assert serve(ledger, 2)
    publish(ledger, 3, 4)
    assert serve(ledger, 4)
    assert states(ledger) == {0: S.PUBLISHED, 1: S.RETIRED, 2: S.RETIRED, 3: S.SKIPPED, 4: S.SERVING}
    assert arrows(list_decisions(ledger, 1)) == [
        (None, S.RESERVED),
        (S.RESERVED, S.PUBLISHED),
        (S.PUBLISHED, S.SERVING),
        (S.SERVING, S.RETIRED),
    ]
    assert ledger.fetch(list_versions)[3].reason == "version 4 served before it did"
    assert list_decisions(ledger, 1)[-1].decided_by == "engine e0"


def test_the_base_is_never_overtaken_since_engines_go_back_to_it(ledger):
    publish(ledger, 0, 1)
    assert serve(ledger, 1)
    assert states(ledger) == {0: S.PUBLISHED, 1: S.SERVING}


def test_a_base_that_an_earlier_release_has_skipped_is_what_serves_when_all_others_are_rejected(ledger):
    publish(ledger, 0, 1)
    with ledger.write() as connection:
        connection.execute(update(versions).where(versions.c.version == 0).values(state=S.SKIPPED))
    assert do(ledger, "reject_version", 1, "a reason", by="engine e0")
    with ledger.read() as connection:
        assert [row.version for row in list_versions(connection) if row.may_serve] == [0]
    wanted = ledger.fetch(wanted_versions).version
    assert wanted is not None and wanted.version == 0


ARROWS = {  # from: what may be done with it, and where it leads
    S.RESERVED: {},
    S.PUBLISHED: {"serve": S.SERVING, "skip": S.SKIPPED, "reject": S.REJECTED, "fail": S.FAILED},
    S.SERVING: {"serve": S.SERVING, "reject": S.REJECTED},
    S.RETIRED: {"serve": S.SERVING, "reject": S.REJECTED},
    S.SKIPPED: {"serve": S.SERVING, "reject": S.REJECTED, "fail": S.FAILED},
    S.REJECTED: {},
    S.FAILED: {"retry": S.PUBLISHED},
}
DOES = {
    "serve": lambda c: transitions.serve_version(c, 1, by="x"),
    "skip": lambda c: transitions.skip_version(c, 1, "a reason", by="x"),
    "reject": lambda c: transitions.reject_version(c, 1, "a reason", by="x"),
    "fail": lambda c: transitions.fail_version(c, 1, "a reason", by="x"),
    "retry": lambda c: transitions.retry_version(c, 1, by="x"),
}


def bring_to(ledger: Ledger, state: S) -> None:
    publish(ledger, 0)
    do(ledger, "reserve_version", writer="trainer")
    if state is S.RESERVED:
        return
    do(ledger, "publish", version=1, parent=0, kind="full", step=1, trainer="trainer")
    way = {S.SERVING: ["serve"], S.RETIRED: ["serve"], S.SKIPPED: ["skip"], S.REJECTED: ["reject"], S.FAILED: ["fail"]}
    for step in way.get(state, []):
        with ledger.write() as connection:
            DOES[step](connection)
    if state is S.RETIRED:
        publish(ledger, 2)
        do(ledger, "serve_version", 2, by="x")


@pytest.mark.parametrize("state", ARROWS)
def test_an_arrow_that_does_not_apply_changes_nothing_and_says_so(ledger, state):
    bring_to(ledger, state)
    assert states(ledger)[1] == state
    before = arrows(list_decisions(ledger, 1))
    for action, do_it in DOES.items():  # each in a transaction of its own, which is rolled back
        with pytest.raises(StopIteration), ledger.write() as connection:
            applied = do_it(connection)
            now = {row.version: row.state for row in list_versions(connection)}[1]
            made = arrows(decisions_in(connection, 1))
            raise StopIteration
        leads_to = ARROWS[state].get(action)
        assert applied is (leads_to is not None), action
        assert now == (leads_to or state), action
        assert made == (before if leads_to in (None, state) else [*before, (state, leads_to)]), action


def test_a_version_that_an_engine_has_proven_is_not_rejected_or_failed_for_another_engine_s_fault(ledger):
    publish(ledger, 0, 1)
    assert serve(ledger, 1)
    assert not do(ledger, "reject_version", 1, "other logprobs", by="engine e1", only_unproven=True)
    assert not do(ledger, "fail_version", 1, "it died", by="engine e1")
    assert states(ledger)[1] == S.SERVING


def test_of_two_explorers_one_that_serves_and_one_that_fails_a_version_only_the_first_has_an_effect(ledger):
    publish(ledger, 0, 1)
    results: dict[str, bool] = {}

    def decide(name: str) -> None:
        with ledger.write() as connection:
            results[name] = DOES[name](connection)

    threads = [threading.Thread(target=decide, args=(name,)) for name in ("serve", "fail")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert sorted(results.values()) == [False, True]
    assert states(ledger)[1] == (S.SERVING if results["serve"] else S.FAILED)
    assert len(list_decisions(ledger, 1)) == 2


def test_a_version_is_retired_when_the_last_engine_has_left_it(ledger, monkeypatch):
    monkeypatch.setattr("shared.ledger.transitions.engine_leases.ENGINE_LEASE_S", 600.0)
    publish(ledger, 0, 1, 2)
    for engine in ("http://e0", "http://e1"):
        assert serve(ledger, 1, engine)
    assert serve(ledger, 2, "http://e0")
    assert states(ledger) == {0: S.PUBLISHED, 1: S.SERVING, 2: S.SERVING}
    assert serve(ledger, 2, "http://e1")
    assert states(ledger) == {0: S.PUBLISHED, 1: S.RETIRED, 2: S.SERVING}


def test_an_engine_that_nobody_owns_any_more_keeps_no_version_in_service(ledger):
    publish(ledger, 0, 1, 2)
    assert serve(ledger, 1, "http://gone")
    with ledger.write() as connection:
        connection.execute(update(engines).values(owner_until=1.0))
    assert serve(ledger, 2)
    assert states(ledger)[1] == S.RETIRED


def test_two_trainers_never_have_the_same_number(ledger):
    publish(ledger, 0)
    numbers: list[tuple[str, int]] = []

    def work(name: str) -> None:
        for step in range(10):
            number = do(ledger, "reserve_version", writer=name)
            numbers.append((name, number))
            assert do(ledger, "reserve_version", writer=name) == number, "it is free again for who died with it"
            do(ledger, "publish", version=number, parent=0, kind="full", step=step, trainer=name)

    threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert sorted(number for _, number in numbers) == list(range(1, 21))


def test_a_number_that_another_trainer_reserved_cannot_be_published(ledger):
    publish(ledger, 0)
    assert do(ledger, "reserve_version", writer="a") == 1
    with pytest.raises(IntegrityError):
        do(ledger, "publish", version=1, parent=0, kind="full", step=1, trainer="b")
    assert states(ledger) == {0: S.PUBLISHED, 1: S.RESERVED}


def test_a_named_lease_has_one_owner_and_is_free_when_that_is_gone(ledger, monkeypatch):
    monkeypatch.setattr("shared.ledger.transitions.leases.LEASE_S", 600.0)
    first, second = process_name(), process_name()
    assert do(ledger, "acquire_lease", "reload", first)
    assert do(ledger, "acquire_lease", "reload", first)
    assert not do(ledger, "acquire_lease", "reload", second)
    assert do(ledger, "acquire_lease", "janitor", second)
    assert do(ledger, "renew_lease", "reload", first)
    assert not do(ledger, "renew_lease", "reload", second)
    do(ledger, "release_lease", "reload", second)
    assert not do(ledger, "acquire_lease", "reload", second)
    do(ledger, "release_lease", "reload", first)
    assert do(ledger, "acquire_lease", "reload", second)
    assert not do(ledger, "renew_lease", "reload", first)
    machine, pid, start, digits = second.split("-")
    gone = f"{machine}-{pid}-{int(start) + 1}-{digits}"  # another process had that number
    do(ledger, "release_lease", "reload", second)
    assert do(ledger, "acquire_lease", "reload", gone)
    assert do(ledger, "acquire_lease", "reload", first)


@pytest.mark.parametrize("until", [1.0, 1e11])
def test_a_named_lease_that_ran_out_or_is_from_before_the_clock_was_put_back_counts_as_none(ledger, until):
    assert do(ledger, "acquire_lease", "reload", "far-away")
    with ledger.write() as connection:
        connection.execute(update(leases).values(until=until))
    assert do(ledger, "acquire_lease", "reload", "here")
    assert not do(ledger, "renew_lease", "reload", "far-away")


def test_an_explorer_s_heartbeat_renews_its_leases_and_its_end_frees_them(ledger):
    assert do(ledger, "acquire_lease", "reload", "a")
    with ledger.write() as connection:
        connection.execute(update(leases).values(until=leases.c.until - 5))
    do(ledger, "heartbeat", "a", {})
    with ledger.read() as connection:
        until, renewed = connection.execute(leases.select()).one().until, transitions.LEASE_S - 1
        assert until > connection.exec_driver_sql("SELECT max(heartbeat_at) FROM explorers").scalar_one() + renewed
    do(ledger, "sign_off", "a")
    assert do(ledger, "acquire_lease", "reload", "b")


def test_a_new_trainer_begins_with_what_engines_have_proven(ledger):
    assert begin_with(ledger, "new") == 0
    publish(ledger, 0, 1, 2)
    assert begin_with(ledger, "new") == 2, "nothing has ever served"
    assert serve(ledger, 1)
    publish(ledger, 3)
    assert begin_with(ledger, "new") == 1
    assert serve(ledger, 3)
    assert begin_with(ledger, "new") == 3
    do(ledger, "reject_version", 3, "a reason", by="engine e0")
    do(ledger, "reserve_version", writer="another")
    assert begin_with(ledger, "new") == 1


def test_an_operator_lets_engines_try_a_failed_version_again(ledger, config, capsys):
    publish(ledger, 0, 1)
    with pytest.raises(StartupError, match="version 1 has not failed"):
        run_here(config, "versions", "retry", "1")
    do(ledger, "fail_version", 1, "engines died on it", by="engine e0")
    assert run_here(config, "versions") == 0
    assert S.FAILED in capsys.readouterr().out
    assert run_here(config, "versions", "retry", "1") == 0
    assert states(ledger)[1] == S.PUBLISHED
    assert list_decisions(ledger, 1)[-1].decided_by == "operator"
    with pytest.raises(ConfigError, match="say which version"):
        run_here(config, "versions", "retry")
    for action in ("retry", "untag"):
        with pytest.raises(ConfigError, match=f"versions {action} 1: it takes no name"):
            run_here(config, "versions", action, "1", "best")


def test_a_version_that_is_tried_again_may_fail_as_often_as_a_new_one(ledger):
    publish(ledger, 0, 1)
    assert do(ledger, "count_load_failure", 1, "e0", "died") == 1
    assert not do(ledger, "retry_version", 1, by="operator")  # it has not failed, so its failures stay
    assert do(ledger, "count_load_failure", 1, "e0", "died") == 2
    do(ledger, "fail_version", 1, "engines died on it", by="engine e0")
    do(ledger, "retry_version", 1, by="operator")
    assert do(ledger, "count_load_failure", 1, "e0", "died") == 1
