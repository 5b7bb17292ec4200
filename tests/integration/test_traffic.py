"""An operator decides which versions serve: what changes in the ledger, and which version should serve then."""

from __future__ import annotations

import pytest
from sqlalchemy import select, update

from shared.errors import CannotServe, ConfigError
from shared.experience import VersionState as S
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import Wanted, find_versions, wanted_versions
from shared.ledger.tables import decisions, experiences
from tests.support.processes import run_here
from tests.support.samples import sample


@pytest.fixture
def published(ledger) -> Ledger:
    """Versions 0 to 4: 0 to 2 have served, 2 is in service, 3 and 4 are published."""
    for version in range(5):
        publish(ledger, version)
        if version < 3:
            do(ledger, "serve_version", version, by="an engine")
    return ledger


def do(ledger: Ledger, name: str, *args, **kwargs):
    with ledger.write() as connection:
        return getattr(transitions, name)(connection, *args, **kwargs)


def publish(ledger: Ledger, version: int) -> None:
    parent = version - 1 if version else None
    do(ledger, "publish", version=version, parent=parent, kind="full", step=version)


def share(ledger: Ledger, weights: dict[int, float], at_most: int = 3) -> dict[int, float]:
    return do(ledger, "share_traffic", weights, at_most=at_most, by="an operator")


def wanted(ledger: Ledger) -> int | None:
    row = ledger.fetch(wanted_versions).version
    return None if row is None else row.version


def state(ledger: Ledger, version: int) -> str:
    return ledger.fetch(lambda connection: find_versions(connection, [version]))[version].state


def test_without_shares_the_newest_version_should_serve(ledger):
    assert ledger.fetch(wanted_versions) == Wanted(None, {})
    publish(ledger, 0)
    publish(ledger, 1)
    assert wanted(ledger) == 1


def test_a_promoted_version_serves_whatever_is_published_later_until_the_newest_is_wanted_again(published):
    assert share(published, {3: 1.0}) == {3: 1.0}
    publish(published, 5)
    assert wanted(published) == 3
    assert share(published, {1: 7}) == {1: 1.0}
    assert wanted(published) == 1
    assert share(published, {}) == {}
    assert wanted(published) == 5


def test_chats_are_divided_by_weight_and_the_largest_share_leads(published):
    assert share(published, {3: 1, 2: 3, 1: 0}) == {2: 0.75, 3: 0.25}
    assert published.fetch(wanted_versions).shares == {2: 0.75, 3: 0.25}
    assert wanted(published) == 2
    share(published, {2: 1, 3: 1})
    assert wanted(published) == 2  # of equal shares, the earlier version
    share(published, {2: 1, 3: 2})
    assert wanted(published) == 3


def test_each_change_is_a_decision_with_the_operators_name(published):
    share(published, {2: 1})
    share(published, {3: 1})
    share(published, {3: 5})
    about = select(decisions.c.version, decisions.c.to_state, decisions.c.reason, decisions.c.decided_by)
    made = published.fetch(lambda c: c.execute(about.where(decisions.c.reason.like("share %"))).all())
    assert [tuple(one) for one in made] == [
        (2, "SERVING", "share of the chats: 1", "an operator"),
        (2, "SERVING", "share of the chats: 0", "an operator"),
        (3, "PUBLISHED", "share of the chats: 1", "an operator"),
    ]


def test_a_skipped_version_that_an_operator_wants_is_not_skipped_again(published):
    do(published, "serve_version", 4, by="an engine")
    assert state(published, 3) == S.SKIPPED
    share(published, {3: 1})
    assert (state(published, 3), wanted(published)) == (S.PUBLISHED, 3)
    do(published, "serve_version", 4, by="another engine")  # which has not moved yet
    assert (state(published, 3), wanted(published)) == (S.PUBLISHED, 3)


@pytest.mark.parametrize("to", [{}, {2: 1}, {4: 1, 2: 1}])
def test_a_proven_version_whose_share_ends_has_served_and_can_be_returned_to(published, to):
    share(published, {2: 9, 3: 1})
    do(published, "prove_version", 3)
    share(published, to)
    about = select(decisions.c.from_state, decisions.c.to_state, decisions.c.reason, decisions.c.decided_by)
    made = published.fetch(lambda c: c.execute(about.where(decisions.c.version == 3).order_by(decisions.c.id)).all())
    assert tuple(made[-1]) == (S.PUBLISHED, S.RETIRED, None, "an operator")
    do(published, "serve_version", 4, by="an engine")
    assert state(published, 3) == S.RETIRED
    assert do(published, "roll_back", 3, by="an operator").rejected == [4]
    assert do(published, "serve_version", 3, by="an engine")


def test_a_version_that_keeps_its_share_leads_was_only_pinned_or_is_not_proven_yet_keeps_its_state(published):
    for version in (3, 4):
        do(published, "prove_version", version)
    publish(published, 5)
    share(published, {2: 5, 3: 1, 5: 1})
    share(published, {3: 1})
    assert [state(published, version) for version in range(2, 6)] == [S.SERVING, S.PUBLISHED, S.PUBLISHED, S.PUBLISHED]
    do(published, "serve_version", 5, by="an engine")
    assert [state(published, version) for version in (3, 4)] == [S.PUBLISHED, S.SKIPPED]


def test_a_rejected_version_whose_share_ends_stays_rejected(published):
    share(published, {2: 9, 3: 1})
    do(published, "prove_version", 3)
    do(published, "reject_version", 3, "a reason", by="an engine")
    share(published, {})
    assert state(published, 3) == S.REJECTED


def test_in_place_of_a_promoted_version_that_was_rejected_the_last_one_that_served_before_it_serves(published):
    share(published, {4: 1})
    do(published, "reject_version", 4, "a reason", by="an engine")
    publish(published, 5)
    assert wanted(published) == 2  # not 3 or 5, which nobody has promoted
    do(published, "reject_version", 2, "a reason", by="an engine")
    assert wanted(published) == 1


def test_the_share_of_a_rejected_version_goes_to_the_leading_one_and_never_to_a_smaller_one(published):
    share(published, {2: 1, 3: 1, 4: 2})
    do(published, "reject_version", 3, "a reason", by="an engine")
    assert published.fetch(wanted_versions).shares == {2: 0.25, 4: 0.75}
    do(published, "reject_version", 2, "a reason", by="an engine")
    assert published.fetch(wanted_versions).shares == {}
    assert wanted(published) == 4


def test_the_share_of_a_leading_version_that_was_rejected_goes_to_the_one_in_its_place(published):
    share(published, {3: 9, 4: 1})
    do(published, "reject_version", 3, "a reason", by="an engine")
    assert published.fetch(wanted_versions).shares == {2: 0.9, 4: 0.1}  # 4 is tried by few, also now
    assert wanted(published) == 2


@pytest.mark.parametrize(
    ("weights", "at_most", "reason"),
    [
        ({9: 1}, 3, "version 9 does not exist; on disk: "),
        ({-1: 1}, 3, "there is no version -1"),
        ({2**70: 1}, 3, "there is no version"),
        ({2: 1, 3: -1}, 3, "a weight is a number from 0 to 1e.09"),
        ({2: float("nan")}, 3, "a weight is a number from 0 to 1e.09"),
        ({2: 1e9 + 1}, 3, "a weight is a number from 0 to 1e.09"),
        ({2: float("inf")}, 3, "a weight is a number from 0 to 1e.09"),
        ({2: 0.0}, 3, "one of the weights has to be above 0"),
        ({2: 1, 3: 1}, 1, "2 versions at once: an engine serves one version; this needs model.kind: lora"),
        ({1: 1, 2: 1, 3: 1}, 2, "3 versions at once: an engine serves 2 versions; this needs model.kind"),
        ({2: 1, 4: 1}, 3, "version 4 is REJECTED and does not serve .it is bad."),
    ],
)
def test_what_cannot_serve_is_refused_and_changes_nothing(published, weights, at_most, reason):
    do(published, "reject_version", 4, "it is bad", by="an engine")
    share(published, {1: 1})
    with pytest.raises(CannotServe, match=reason):
        share(published, weights, at_most)
    assert wanted(published) == 1


def test_huge_and_tiny_weights_are_divided_too(published):
    assert share(published, {2: 1e9, 3: 1e9}) == {2: 0.5, 3: 0.5}
    assert share(published, {2: 5e-324, 3: 5e-324}) == {2: 0.5, 3: 0.5}
    assert share(published, {2: 1e9, 3: 5e-324}) == {2: 1.0}


def test_the_files_of_versions_with_shares_are_kept(published):
    share(published, {1: 1, 3: 1})
    publish(published, 5)
    args = {"owner": "a janitor", "max_versions": 1, "max_bytes": float("inf"), "sizes": {}, "by": "a trainer"}
    given_up = do(published, "give_up_files", **args)
    assert 4 in given_up and not {1, 3} & set(given_up)
    share(published, {})
    assert {1, 3} & set(do(published, "give_up_files", **args))


def test_a_rollback_sends_all_chats_back_if_a_rejected_version_has_a_share(published):
    share(published, {2: 0.9, 3: 0.1})
    do(published, "roll_back", 2, by="an operator")
    assert published.fetch(wanted_versions).shares == {}
    publish(published, 5)
    assert wanted(published) == 2


def test_a_rollback_leaves_shares_of_earlier_versions_and_none(published):
    share(published, {1: 1})
    do(published, "roll_back", 2, by="an operator")
    assert wanted(published) == 1
    share(published, {})
    do(published, "roll_back", 1, by="an operator")
    publish(published, 5)
    assert wanted(published) == 5


def test_a_rollback_says_who_answers_if_it_is_not_the_version_gone_back_to(published, config, capsys):
    share(published, {0: 3, 1: 1})
    assert run_here(config, "rollback", "2") == 0
    said = capsys.readouterr().out
    assert "rolled back to version 2; rejected: 3, 4; chats stay with version 0 75%, version 1 25%" in said
    assert "flywheel traffic newest" in said and "engines load" not in said
    do(published, "reject_version", 0, "a reason", by="an engine")
    share(published, {1: 1})
    assert do(published, "roll_back", 1, by="an operator").traffic == {1: 1.0}


def test_the_share_of_a_version_that_was_rejected_is_shown_with_the_state(published, config, capsys):
    share(published, {2: 9, 3: 1})
    do(published, "reject_version", 3, "a reason", by="an engine")
    for command in ("traffic", "status"):
        assert run_here(config, command) == 0
        assert "chats: version 2 90%, version 3 10% (REJECTED: it answers none)" in capsys.readouterr().out


def test_the_commands_say_what_serves_and_why_they_refuse(published, config, capsys):
    def said(*command: str) -> str:
        assert run_here(config, *command) == 0
        return capsys.readouterr().out

    assert "chats: version 3 100%; engines load" in said("promote", "3")
    assert "chats: version 3 100%" in said("status")
    assert "share 100%" in said("versions")
    assert said("traffic").splitlines() == ["chats: version 3 100%", "version 3  rewards none yet"]
    assert "chats: all to the newest version that may serve; engines load" in said("traffic", "newest")
    assert said("traffic").splitlines() == ["chats: all to the newest version that may serve"]
    assert "chats: " not in said("status")
    for command, error, reason in (
        (("promote", "9"), CannotServe, "version 9 does not exist"),
        (("traffic", "1=1", "2=1"), CannotServe, "model.kind: lora"),
        (("traffic", "1=1", "1=2"), ConfigError, "name each version once"),
        (("traffic", "newest", "1=1"), ConfigError, "name each version once"),
    ):
        with pytest.raises(error, match=reason):
            run_here(config, *command)
    for wrong in ("1", "1=x", "=1", "x=1"):
        with pytest.raises(SystemExit):
            run_here(config, "traffic", wrong)


def test_the_command_shows_the_rewards_of_each_version_that_has_a_share(published, config, capsys):
    share(published, {1: 3, 2: 1, 3: 1})
    names = [f"m{number}" for number in range(5)]
    do(published, "record", [sample(name) for name in names])
    with published.write() as connection:
        for name, version, reward in zip(names, (1, 1, 1, 1, 2), (1.0, 0.0, 1.0, 1.0, 0.5), strict=True):
            row = update(experiences).where(experiences.c.msg_id == name)
            connection.execute(row.values(version=version, version_end=version, reward=reward))
    assert run_here(config, "traffic") == 0
    assert capsys.readouterr().out.splitlines() == [
        "chats: version 1 60%, version 2 20%, version 3 20%",
        "version 1  rewards 0.75 ± 0.25  rows 4",
        "version 2  rewards 0.5  rows 1",
        "version 3  rewards none yet",
    ]
