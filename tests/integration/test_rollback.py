"""An operator goes back to an earlier version: what changes in the ledger, and what its trainers may not do then."""

from __future__ import annotations

import pytest
from sqlalchemy import select, update

from services.trainer import begin_with
from shared.errors import CannotRollBack, RolledBack
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import find_trainer, list_versions
from shared.ledger.tables import decisions, experiences, trainers, versions
from tests.support.lessons import COMMENT, RUN, UP, record, say, stands, train
from tests.support.processes import run_here

NAME = "t"


@pytest.fixture
def trained(ledger) -> Ledger:
    """Versions 0 to 4 of one trainer, all proven, the last in service; saved states of versions 2 to 4."""
    with ledger.write() as connection:
        transitions.publish(connection, version=0, parent=None, kind="full", step=0)
        transitions.serve_version(connection, 0, by="an engine")
        transitions.announce_trainer(connection, name=NAME, step=0, version=0, state_path=None, state_sha256=None)
    for version in range(1, 5):
        make_version(ledger, version)
    with ledger.write() as connection:
        assert len(transitions.forget_old_states(connection, trainer=NAME, current=None, keep=3)) == 3
    return ledger


def publish_base(ledger: Ledger) -> None:
    with ledger.write() as connection:
        transitions.publish(connection, version=0, parent=None, kind="full", step=0)


def train_one(ledger: Ledger) -> None:
    """Version 1 is trained on the rating of row a."""
    publish_base(ledger)
    record(ledger, "a")
    say(ledger, "a", UP)
    train(ledger, 1)


def make_version(ledger: Ledger, version: int, rollbacks: int = 0) -> None:
    with ledger.write() as connection:
        transitions.require_not_rolled_back(connection, trainer=NAME, rollbacks=rollbacks)
        assert transitions.reserve_version(connection, writer=NAME) == version
        about = {"parent": version - 1, "kind": "full", "step": version, "trainer": NAME}
        state = {"state_path": f"trainer/t/state-{version:06d}", "state_sha256": f"{version}"}
        transitions.publish(connection, version=version, **about, **state)
        transitions.serve_version(connection, version, by="an engine")


def roll_back(ledger: Ledger, to: int | None = None) -> transitions.Rollback:
    with ledger.write() as connection:
        return transitions.roll_back(connection, to, by="operator")


def states(ledger: Ledger) -> list[str]:
    with ledger.read() as connection:
        return [row.state for row in list_versions(connection)]


def trainer_row(ledger: Ledger):
    with ledger.read() as connection:
        return find_trainer(connection, NAME)


def test_later_versions_are_rejected_with_the_reason_and_the_trainer_starts_from_the_state_of_that_version(trained):
    done = roll_back(trained, 2)
    assert (done.to, done.rejected, done.trainers) == (2, [3, 4], {NAME: True})
    assert states(trained) == ["RETIRED", "RETIRED", "RETIRED", "REJECTED", "REJECTED"]
    row = trainer_row(trained)
    assert (row.version, row.step, row.state_path, row.state_sha256) == (2, 2, "trainer/t/state-000002", "2")
    with trained.read() as connection:
        of = select(decisions.c.from_state, decisions.c.reason, decisions.c.decided_by).where(decisions.c.version == 4)
        last = connection.execute(of.order_by(decisions.c.id.desc())).first()
    assert tuple(last) == ("SERVING", "rolled back to version 2", "operator")


def test_without_a_saved_state_of_that_version_the_trainer_starts_from_its_weights(trained):
    assert roll_back(trained, 1).trainers == {NAME: False}
    row = trainer_row(trained)
    assert (row.version, row.step, row.state_path, row.state_sha256) == (1, 0, None, None)


def test_without_a_number_it_goes_back_to_the_version_that_served_before(trained):
    assert roll_back(trained).to == 3
    assert roll_back(trained).to == 2
    make_version(trained, 5, rollbacks=2)
    assert roll_back(trained).to == 2
    with trained.write() as connection:  # published later and not proven: it is not the one in service
        transitions.publish(connection, version=6, parent=2, kind="full", step=3)
        transitions.serve_version(connection, 2, by="an engine")
    assert roll_back(trained).to == 1


def test_without_a_number_a_version_that_is_tried_with_a_share_is_the_one_in_service(trained):
    with trained.write() as connection:
        transitions.publish(connection, version=5, parent=4, kind="full", step=5, trainer=NAME, state_path="s")
        transitions.share_traffic(connection, {4: 9, 5: 1}, at_most=2, by="operator")
        transitions.prove_version(connection, 5)
    done = roll_back(trained)
    assert (done.to, done.rejected, done.traffic) == (4, [5], {4: 1.0})


def test_with_again_all_that_rejected_versions_learned_acts_as_if_they_had_never_been(ledger):
    publish_base(ledger)
    record(ledger, "a", "b", "c", **RUN)
    say(ledger, "b", UP)
    say(ledger, "a", COMMENT)
    first = train(ledger, 1)
    say(ledger, "c", COMMENT)
    second = train(ledger, 2)
    assert set(first) == {"a", "b", "c"} and set(second) == {"c"}
    with ledger.write() as connection:
        assert transitions.roll_back(connection, 0, again=True, by="operator").rows == 3
        taught = select(experiences.c.state, experiences.c.taught, experiences.c.consumed_version).distinct()
        assert connection.execute(taught).all() == [("READY", 0, None)]
    again = train(ledger, 3)
    assert again == first | {"c": (first["c"][0] | second["c"][0], first["c"][1], ["comment"])}


def test_with_again_rows_that_the_version_itself_was_trained_on_stay_as_they_are(ledger):
    publish_base(ledger)
    record(ledger, "a", "b")
    say(ledger, "a", UP)
    train(ledger, 1)
    say(ledger, "a", COMMENT)
    say(ledger, "b", UP)
    assert set(train(ledger, 2)) == {"a", "b"}
    with ledger.write() as connection:
        transitions.serve_version(connection, 1, by="an engine")
        assert transitions.roll_back(connection, 1, again=True, by="operator").rows == 1
    assert set(train(ledger, 3)) == {"b"}


def test_an_erased_row_stays_erased_with_again(ledger):
    train_one(ledger)
    with ledger.write() as connection:
        transitions.erase(connection, msg_id="a")
        assert transitions.roll_back(connection, 0, again=True, by="operator").rows == 0
        assert transitions.erase(connection, msg_id="a").versions == {1}
    assert stands(ledger, "state", "consumed_version") == [("CONSUMED", 1)]


def test_an_erasure_names_the_version_of_the_present_line_too(ledger):
    train_one(ledger)
    with ledger.write() as connection:
        transitions.roll_back(connection, 0, by="operator")
    say(ledger, "a", COMMENT)
    train(ledger, 2)
    with ledger.write() as connection:
        assert transitions.erase(connection, msg_id="a").versions == {1, 2}


def test_after_a_resume_rewards_of_rejected_versions_do_not_count(trained):
    with trained.write() as connection:
        transitions.trip_breaker(connection, name=NAME, tripped={"figure": "reward_drop"})
    roll_back(trained, 2)
    with trained.write() as connection:
        assert transitions.reset_breaker(connection, name=NAME)
    assert trainer_row(trained).resumed_version == 4


def test_a_trainer_that_its_breaker_holds_is_named_with_what_releases_it(trained, config, capsys):
    with trained.write() as connection:
        transitions.trip_breaker(connection, name=NAME, tripped={"figure": "reward_drop"})
    assert run_here(config, "rollback", "3") == 0
    said = capsys.readouterr().out
    assert "trainer t: its breaker holds it (reward_drop); after `flywheel trainer --resume`, it starts again" in said
    done = roll_back(trained, 2)
    assert (done.trainers, done.held) == ({NAME: True}, {NAME: "reward_drop"})


def test_a_repeat_changes_nothing(trained):
    roll_back(trained, 2)
    again = roll_back(trained, 2)
    assert (again.rejected, again.trainers, again.held) == ([], {}, {})


def test_what_the_trainer_publishes_or_begins_after_it_is_refused_until_it_has_started_again(trained):
    roll_back(trained, 2)
    with pytest.raises(RolledBack, match="gone back to version 2"):
        make_version(trained, 5)
    assert len(states(trained)) == 5
    make_version(trained, 5, rollbacks=trainer_row(trained).rollbacks)
    assert states(trained)[-1] == "SERVING"


def test_a_trainer_that_was_starting_from_a_later_version_is_told(trained):
    roll_back(trained, 2)
    with trained.write() as connection, pytest.raises(RolledBack, match="version 4 was rejected"):
        transitions.require_not_rolled_back(connection, trainer="a new one", rollbacks=0, start=4)
    with trained.write() as connection:
        transitions.require_not_rolled_back(connection, trainer="a new one", rollbacks=0, start=2)


def test_versions_of_other_trainers_are_rejected_too_and_these_start_again(trained):
    with trained.write() as connection:
        for name, version in (("other", 5), ("older", 0)):
            about = {"step": version, "version": version, "state_path": None, "state_sha256": None}
            transitions.announce_trainer(connection, name=name, **about)
        transitions.publish(connection, version=5, parent=0, kind="full", step=1, trainer="other", state_path="s")
    assert roll_back(trained, 2).trainers == {NAME: True, "other": False}
    with trained.read() as connection:
        assert find_trainer(connection, "older").rollbacks == 0


def test_a_trainer_without_a_state_of_that_version_starts_from_it_whatever_others_publish_meanwhile(trained):
    with trained.write() as connection:
        assert transitions.roll_back(connection, 1, by="operator").trainers == {NAME: False}
        transitions.publish(connection, version=5, parent=0, kind="full", step=1, trainer="other", state_path="s")
        transitions.serve_version(connection, 5, by="an engine")
    assert begin_with(trained, NAME) == 1
    assert begin_with(trained, "a new one") == 5
    with trained.write() as connection:
        transitions.reject_version(connection, 1, "a reason", by="an engine")
    assert begin_with(trained, NAME) == 5


def test_a_version_that_no_saved_state_contains_yet_is_refused_and_one_before_it_withdraws_it(trained):
    with trained.write() as connection:
        assert transitions.reserve_version(connection, writer=NAME) == 5
        transitions.publish_ahead(connection, version=5, trainer=NAME, parent=4, kind="full", step=5)
        transitions.serve_version(connection, 5, by="an engine")
        assert transitions.reserve_version(connection, writer=NAME) == 6
        transitions.publish_ahead(connection, version=6, trainer=NAME, parent=5, kind="full", step=6)
    with pytest.raises(CannotRollBack, match=r"no saved state .* version 5 yet .* go back to version 4"):
        roll_back(trained, 5)
    with trained.write() as connection:
        transitions.serve_version(connection, 6, by="an engine")
    done = roll_back(trained)  # to the last version that is in a state
    assert (done.to, done.rejected, done.trainers) == (4, [5, 6], {NAME: True})
    with trained.write() as connection, pytest.raises(RolledBack):
        transitions.require_not_rolled_back(connection, trainer=NAME, rollbacks=0)


@pytest.mark.parametrize(
    ("to", "found"),
    [
        (9, "there is no version 9"),
        (2, "the files of version 2 are deleted"),
        (3, "version 3 is REJECTED; only a version that has served"),
        (5, "version 5 is PUBLISHED; only a version that has served"),
        (6, "there is no version 6"),
    ],
)
def test_what_cannot_serve_cannot_be_returned_to_and_nothing_changes(trained, to, found):
    with trained.write() as connection:
        connection.execute(update(versions).where(versions.c.version == 2).values(deleted_at=1.0))
        connection.execute(update(versions).where(versions.c.version == 3).values(state="REJECTED"))
        transitions.publish(connection, version=5, parent=4, kind="full", step=5)
        assert transitions.reserve_version(connection, writer=NAME) == 6
    before = states(trained)
    with pytest.raises(CannotRollBack, match=found):
        roll_back(trained, to)
    assert states(trained) == before
    with trained.read() as connection:
        assert connection.execute(select(trainers.c.rollbacks)).scalar_one() == 0


def test_with_one_version_there_is_none_to_go_back_to(ledger):
    with pytest.raises(CannotRollBack, match="there is no version yet"):
        roll_back(ledger)
    with ledger.write() as connection:
        transitions.publish(connection, version=0, parent=None, kind="full", step=0)
    with pytest.raises(CannotRollBack, match="no version before 0 has served"):
        roll_back(ledger)


def test_the_command_says_what_changed_and_why_it_refuses(trained, config, capsys):
    assert run_here(config, "rollback", "2") == 0
    said = capsys.readouterr().out
    assert "rolled back to version 2; rejected: 3, 4" in said
    assert "trainer t starts again from its saved state" in said
    assert run_here(config, "rollback", "--again") == 0
    said = capsys.readouterr().out
    assert "version 1" in said and "with a new optimizer" in said and "trained on again: 0" in said
    for wrong in ("4", "99999999999"):
        with pytest.raises(CannotRollBack, match=f"version {wrong}"):
            run_here(config, "rollback", wrong)
