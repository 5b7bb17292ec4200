"""Rows that wait for other runs of their task stand in nobody's way; demonstrations do not grow stale."""

from __future__ import annotations

from sqlalchemy import select, update

from shared.config import RewardConfig, TrainerConfig
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import count_by_state, quarantined
from shared.ledger.tables import experiences
from shared.reward import SCORES, Lesson, Signal
from shared.stop_request import StopRequest
from tests.support.samples import sample
from trainer_service.batch import make_batch
from trainer_service.claim import Claimer

GROUPS = {"algorithm": "grpo", "grpo": {"group_timeout_s": None}, "batch_size": 8, "poll_interval_s": 0.02}
UP = Signal("reward", value=1.0)


def make_ready(ledger: Ledger, names: list[str], signal: Signal = UP, key: str | None = None, **about: str) -> None:
    given = {"rule": RewardConfig(), "learned": SCORES | {"demonstration"}, "task_id": None, "run_id": None}
    with ledger.write() as connection:
        transitions.record(connection, [sample(name, **about) for name in names])
        for name in names:
            transitions.apply_feedback(connection, msg_ids=[name], signals=[signal], key_name=key, **given)
        transitions.commit(connection)


def claimer(ledger: Ledger, **config: object) -> Claimer:
    return Claimer(ledger, TrainerConfig.model_validate({**GROUPS, **config}), StopRequest())


def test_a_batch_that_fails_is_halved_beside_an_older_run_that_waits_for_others(ledger):
    make_ready(ledger, ["lonely"], task_id="waits", run_id="0")
    for task in range(4):
        for run in range(2):
            make_ready(ledger, [f"{task}-{run}"], task_id=str(task), run_id=str(run))
    mine, trained, version = claimer(ledger), [], 0
    while len(trained) < 7:
        lease = mine.next()
        assert lease is not None
        names = [row.msg_id for row in lease.rows]
        version += 1
        assert version < 20, "it is not halved"
        with ledger.write() as connection:
            if "2-1" in names:
                transitions.fail_update(connection, lease.batch_id, "it is bad")
            else:
                trained += names
                about = {"version": version, "parent": None, "kind": "full", "step": 1, "trainer": "trainer"}
                transitions.publish(connection, **about, batch_ids=[lease.batch_id])
        mine.search_anew()
    assert "lonely" not in trained
    assert ledger.fetch(quarantined) == {"quarantined: the update failed with it alone: it is bad": 1}
    assert ledger.fetch(count_by_state)["READY"] == 1


def test_a_run_that_waits_takes_no_place_of_its_key_s_share(ledger):
    for number in range(4):
        make_ready(ledger, [f"lonely-{number}"], key="a", task_id=f"lonely-{number}", run_id="0")
    for key in ("a", "b"):
        for task in range(3):
            for run in range(2):
                make_ready(ledger, [f"{key}-{task}-{run}"], key=key, task_id=f"{key}-{task}", run_id=str(run))
    lease = claimer(ledger, max_share_per_key=0.5, max_staleness_versions=16).next()
    assert lease is not None
    assert sorted(row.msg_id for row in lease.rows) == [
        f"{k}-{t}-{r}" for k in "ab" for t in range(2) for r in range(2)
    ]


def test_a_demonstration_does_not_grow_stale(ledger):
    make_ready(ledger, [f"shown-{number}" for number in range(3)], Signal("demonstration"))
    make_ready(ledger, ["sampled"])
    with ledger.write() as connection:
        for version in range(8):
            transitions.publish(connection, version=version, parent=None, kind="full", step=version)
            transitions.serve_version(connection, version, by="an engine")
    config = {"algorithms": {"reinforce_pp": 1.0, "sft": 0.2}, "batch_size": 3, "max_staleness_versions": 2}
    lease = Claimer(ledger, TrainerConfig.model_validate({**config, "poll_interval_s": 0.02}), StopRequest()).next()
    assert lease is not None
    assert [row.msg_id for row in lease.rows] == ["shown-0", "shown-1", "shown-2"]
    assert ledger.fetch(count_by_state)["DISCARDED"] == 1


def test_a_comment_leaves_a_reward_with_the_key_that_set_it(ledger):
    learned = SCORES | {"comment"}
    given = {"rule": RewardConfig(), "learned": learned, "task_id": None, "run_id": None}
    with ledger.write() as connection:
        for number in range(4):
            transitions.record(connection, [sample(f"m{number}")])
            for key, signal in (("a", UP), (f"b{number}", Signal("comment", text="shorter"))):
                transitions.apply_feedback(connection, msg_ids=[f"m{number}"], signals=[signal], key_name=key, **given)
        transitions.commit(connection)
        keys = connection.execute(select(experiences.c.feedback_key)).scalars().all()
        assert keys == ["a"] * 4
        half = {"owner": "t", "at_least": 4, "at_most": 4, "lease_s": 60, "share_per_key": 0.5}
        assert transitions.claim(connection, **half) is None


def test_words_about_a_trained_reward_count_as_the_key_s_that_wrote_them(ledger):
    given = {"rule": RewardConfig(), "learned": SCORES | {"comment"}, "task_id": None, "run_id": None}
    say = Signal("comment", text="shorter")
    make_ready(ledger, [f"old-{number}" for number in range(4)], key="a")
    with ledger.write() as connection:
        batch = transitions.claim(connection, owner="t", at_least=4, at_most=4, lease_s=60)
        about = {"version": 1, "parent": None, "kind": "full", "step": 1, "trainer": "t"}
        transitions.publish(connection, **about, batch_ids=[batch])
        olds = [f"old-{number}" for number in range(4)]
        transitions.apply_feedback(connection, msg_ids=olds, signals=[say], key_name="b", **given)
    make_ready(ledger, [f"new-{number}" for number in range(4)], key="a")
    with ledger.write() as connection:
        keys = select(experiences.c.feedback_key).where(experiences.c.msg_id.in_(olds))
        assert set(connection.execute(keys).scalars()) == {"b"}
        half = {"owner": "t", "at_least": 4, "at_most": 4, "lease_s": 60, "share_per_key": 0.5}
        batch = transitions.claim(connection, **half)
        names = select(experiences.c.msg_id).where(experiences.c.batch_id == batch, experiences.c.state == "LEASED")
        assert sorted(connection.execute(names).scalars()) == ["new-0", "new-1", "old-0", "old-1"]


def test_a_comment_on_a_later_turn_leaves_the_earlier_turns_to_the_key_that_rewarded_the_run(ledger):
    given = {"rule": RewardConfig(), "learned": SCORES | {"comment"}, "task_id": None, "run_id": None}
    with ledger.write() as connection:
        transitions.record(connection, [sample(f"turn-{n}", task_id="t", run_id="0") for n in range(4)])
        for turn, key, signal in ((2, "a", UP), (3, "b", Signal("comment", text="shorter"))):
            transitions.apply_feedback(connection, msg_ids=[f"turn-{turn}"], signals=[signal], key_name=key, **given)
        transitions.commit(connection)
        keys = connection.execute(select(experiences.c.feedback_key).order_by(experiences.c.id)).scalars().all()
    assert keys == ["a", "a", "a", "b"]


def test_a_metric_without_a_weight_makes_no_reward_its_key_s(ledger):
    rule = RewardConfig(metrics={"quality": 1.0})
    given = {"rule": rule, "learned": SCORES, "task_id": None, "run_id": None, "msg_ids": ["m"]}
    with ledger.write() as connection:
        transitions.record(connection, [sample("m")])
        for key, name in (("rater", "quality"), ("monitor", "latency")):
            signal = Signal("metric", value=1.0, name=name)
            transitions.apply_feedback(connection, signals=[signal], key_name=key, **given)
        transitions.commit(connection)
    config = TrainerConfig.model_validate({"algorithm": "reinforce_pp", "batch_size": 1, "poll_interval_s": 0.02})
    lease = Claimer(ledger, config, StopRequest(), rule=rule).next()
    assert lease is not None
    assert make_batch(lease.rows).scored_by == {0: "rater"}


def test_words_about_a_demonstration_that_was_trained_on_do_not_grow_stale(ledger):
    make_ready(ledger, ["shown"], Signal("demonstration"))
    config = TrainerConfig.model_validate(
        {"algorithms": {"sft": 1.0}, "batch_size": 1, "poll_interval_s": 0.02, "max_staleness_versions": 2}
    )
    lease = Claimer(ledger, config, StopRequest()).next()
    assert lease is not None
    given = {"rule": RewardConfig(), "learned": frozenset(("correction",)), "task_id": None, "run_id": None}
    with ledger.write() as connection:
        about = {"parent": None, "kind": "full", "trainer": "trainer"}
        transitions.publish(connection, version=1, step=1, batch_ids=[lease.batch_id], **about)
        for version in range(2, 8):
            transitions.publish(connection, version=version, step=version, **about)
            transitions.serve_version(connection, version, by="an engine")
        said = [Signal("correction", text="w3")]
        transitions.apply_feedback(connection, msg_ids=["shown"], signals=said, key_name="a", **given)
        transitions.commit(connection)
    lease = Claimer(ledger, config, StopRequest()).next()
    assert lease is not None and [row.msg_id for row in lease.rows] == ["shown"]


def test_the_reward_of_a_demonstration_grows_stale_but_not_the_demonstration(ledger):
    make_ready(ledger, ["both", "shown"], Signal("demonstration"))
    config = TrainerConfig.model_validate(
        {"algorithms": {"reinforce_pp": 1.0, "sft": 1.0}, "batch_size": 1, "max_staleness_versions": 2}
    )
    given = {"rule": RewardConfig(), "learned": SCORES | {"demonstration"}, "task_id": None, "run_id": None}
    with ledger.write() as connection:
        connection.execute(update(experiences).where(experiences.c.msg_id == "shown").values(taught=16, teaches=0))
        for version in range(8):
            transitions.publish(connection, version=version, parent=None, kind="full", step=version)
            transitions.serve_version(connection, version, by="an engine")
        transitions.apply_feedback(connection, msg_ids=["both", "shown"], signals=[UP], **given)
        transitions.commit(connection)
    lease = Claimer(ledger, config, StopRequest()).next()
    assert lease is not None
    assert [(row.msg_id, row.acts) for row in lease.rows] == [("both", Lesson.DEMONSTRATION)]
    assert ledger.fetch(count_by_state)["READY"] == 0
