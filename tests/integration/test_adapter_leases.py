"""What an engine has and what callers have pinned keeps its files, whoever dies. On both databases."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import select, update

from shared.experience import Purpose
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger
from shared.ledger.tables import version_leases

ENGINE = "machine http://e0"


@pytest.fixture
def ledger(ledger):
    """Versions 0 to 5, of which 5 serves."""
    for version in range(6):
        with ledger.write() as connection:
            about = {"kind": "lora" if version else "full", "step": version, "manifest_sha256": f"{version:064x}"}
            transitions.publish(connection, version=version, parent=version - 1 if version else None, **about)
            transitions.serve_version(connection, version, by="engine e0")
    return ledger


def hold(ledger: Ledger, serves: list[int], leaving: tuple[int, ...] = ()) -> None:
    with ledger.write() as connection:
        transitions.hold_adapters(connection, ENGINE, serves=serves, leaving=leaving)


def pin(ledger: Ledger, version: int, explorer: str = "explorer", lasts_s: float = 60.0) -> bool:
    with ledger.write() as connection:
        return transitions.pin_version(connection, version, explorer=explorer, lasts_s=lasts_s)


def give_up(ledger: Ledger) -> set[int]:
    about = {"owner": "janitor", "max_versions": 0, "max_bytes": 0.0, "sizes": {}, "by": "trainer"}
    with ledger.write() as connection:
        return set(transitions.give_up_files(connection, **about))


def purposes(ledger: Ledger, version: int) -> set[str]:
    with ledger.read() as connection:
        query = select(version_leases.c.purpose).where(version_leases.c.version == version)
        return set(connection.execute(query).scalars())


def test_what_an_engine_serves_is_what_its_owner_said_last(ledger):
    hold(ledger, [1, 2])
    hold(ledger, [2, 3])
    with ledger.read() as connection:
        assert queries.served_adapters(connection, ENGINE) == {2: f"{2:064x}", 3: f"{3:064x}"}
        assert queries.served_adapters(connection, "another") == {}


def test_what_an_engine_gave_up_keeps_its_files_until_nobody_who_was_away_could_still_ask_for_it(ledger):
    hold(ledger, [1, 2, 3])
    hold(ledger, [3], leaving=(2,))
    assert (purposes(ledger, 1), purposes(ledger, 2)) == ({"unloading"}, {"unloading"})
    hold(ledger, [3])
    assert not give_up(ledger) & {1, 2, 3}
    with ledger.write() as connection:
        ended = {"until": time.time() - 1}
        connection.execute(update(version_leases).where(version_leases.c.purpose == Purpose.UNLOADING).values(ended))
    assert give_up(ledger) >= {1, 2}


def test_what_an_engine_has_is_kept_while_its_owner_renews_it_and_what_it_unloaded_is_not(ledger):
    hold(ledger, [1, 2, 3, 4])
    hold(ledger, [4], leaving=(2, 3))
    with ledger.write() as connection:
        connection.execute(update(version_leases).values(until=time.time() + 1))
        transitions.renew_adapters(connection, ENGINE, has=[2, 4, 5])
        transitions.renew_adapters(connection, "another", has=[1])
    with ledger.read() as connection:
        rows = connection.execute(select(version_leases.c.version, version_leases.c.until)).all()
    assert {row.version for row in rows if row.until > time.time() + 50} == {2, 4}
    assert {row.version for row in rows} == {1, 2, 3, 4}


def test_what_an_engine_has_outlives_its_owner(ledger):
    hold(ledger, [1], leaving=(2,))
    assert pin(ledger, 3)
    with ledger.write() as connection:
        transitions.heartbeat(connection, "explorer", {})
        transitions.sign_off(connection, "explorer")
    assert (purposes(ledger, 1), purposes(ledger, 2), purposes(ledger, 3)) == ({"serving"}, {"unloading"}, set())


def test_the_lease_of_a_load_ends_when_the_load_is_told(ledger):
    with ledger.write() as connection:
        about = {"reader": ENGINE, "purpose": Purpose.LOADING, "owner": "explorer"}
        assert transitions.lease_version(connection, 1, **about)
    hold(ledger, [1])
    assert purposes(ledger, 1) == {"serving"}


def test_what_an_engine_is_about_to_have_keeps_its_files_though_the_explorer_dies_and_another_takes_over(ledger):
    with ledger.write() as connection:
        transitions.heartbeat(connection, "explorer", {})
        about = {"reader": ENGINE, "purpose": Purpose.LOADING, "owner": "explorer"}
        assert transitions.lease_version(connection, 1, **about)
        assert transitions.expect_adapter(connection, ENGINE, 1)
        transitions.sign_off(connection, "explorer")
    hold(ledger, [3])
    with ledger.read() as connection:
        assert queries.leased_versions(connection, ENGINE) == [1, 3]
    assert not give_up(ledger) & {1, 3}


def test_pins_are_told_by_their_last_use_and_end_by_themselves_whatever_the_explorer_renews(ledger):
    assert pin(ledger, 1, lasts_s=50.0) and pin(ledger, 2, lasts_s=60.0) and pin(ledger, 1, "another", lasts_s=70.0)
    assert pin(ledger, 3, lasts_s=-1.0)
    with ledger.write() as connection:
        transitions.heartbeat(connection, "explorer", {})
    with ledger.read() as connection:
        assert queries.pinned_versions(connection) == [1, 2]
    assert not give_up(ledger) & {1, 2}


def test_a_pin_is_renewed_while_it_lasts_and_not_after_its_end(ledger):
    assert pin(ledger, 1, lasts_s=50.0) and pin(ledger, 2, lasts_s=60.0) and pin(ledger, 3, lasts_s=-1.0)
    with ledger.write() as connection:
        assert transitions.renew_pin(connection, 1, explorer="explorer", lasts_s=70.0)
        assert not transitions.renew_pin(connection, 3, explorer="explorer", lasts_s=70.0)
        assert not transitions.renew_pin(connection, 2, explorer="another", lasts_s=70.0)
        assert queries.pinned_versions(connection) == [1, 2]


def test_a_version_whose_files_are_given_up_is_not_pinned(ledger):
    assert 1 in give_up(ledger)
    assert not pin(ledger, 1)
    with ledger.write() as connection:
        assert not transitions.expect_adapter(connection, ENGINE, 1)
