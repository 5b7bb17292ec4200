"""The version that an imported row names: what this ledger's versions sampled, and what they did not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from shared.config import BreakerConfig, RewardConfig
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import rewards_by_version
from shared.ledger.tables import experiences, payloads, signals
from shared.reward import Signal
from tests.support.experiences import record_ready, rows
from tests.support.processes import run_here
from tests.support.samples import sample
from trainer_service.breaker import reward_drop

ROW: dict[str, Any] = {"prompt_ids": [1, 2], "reply_ids": [3], "logprobs": [-0.5]}


@pytest.fixture
def served(ledger: Ledger) -> Ledger:
    """A ledger with versions 0 to 3, of which version 2 is rejected."""
    with ledger.write() as connection:
        for version in range(4):
            transitions.publish(connection, version=version, parent=None, kind="full", step=version)
        assert transitions.reject_version(connection, 2, "other logprobs", by="engine e0")
    return ledger


def stored_versions(ledger: Ledger) -> list[tuple[int, int]]:
    query = select(experiences.c.version, experiences.c.version_end).order_by(experiences.c.id)
    with ledger.read() as connection:
        return [(row.version, row.version_end) for row in connection.execute(query)]


def emptied(ledger: Ledger) -> None:
    with ledger.write() as connection:
        for table in (signals, payloads, experiences):
            connection.execute(table.delete())


def imported(config, file: Path, *lines: dict[str, Any]) -> None:
    file.write_text("\n".join(map(json.dumps, lines)))
    assert run_here(config, "import", str(file)) == 0


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_rows_keep_the_versions_that_sampled_them_also_rejected_ones(served, config, tmp_path: Path, name):
    sampled = [(0, 0), (1, 2), (2, 2), (2, 3), (3, 3)]
    with served.write() as connection:
        for number, (version, end) in enumerate(sampled):
            transitions.record(connection, [sample(f"m{number}", version=version, version_end=end)])
    run_here(config, "export", "--tokens", "--out", str(tmp_path / name))
    emptied(served)
    assert run_here(config, "import", str(tmp_path / name)) == 0
    assert stored_versions(served) == sampled


def test_rows_of_a_rejected_version_come_back_from_an_archive_as_its_own(served, config, tmp_path: Path):
    with served.write() as connection:
        transitions.record(connection, [sample("m", version=2, version_end=2)])
        connection.execute(update(experiences).values(state="DISCARDED", reason="expired"))
    run_here(config, "archive", "--to", str(tmp_path / "archive"), "--older-than-days", "0")
    (file,) = (tmp_path / "archive").iterdir()
    assert run_here(config, "import", str(file)) == 0
    assert stored_versions(served) == [(2, 2)]


def test_rows_that_no_version_of_this_ledger_sampled_name_the_newest_but_were_not_sampled_by_it(
    served, config, tmp_path: Path
):
    imported(config, tmp_path / "rows.jsonl", ROW, {**ROW, "version": 4}, {**ROW, "version": 1, "version_end": 7})
    assert stored_versions(served) == [(3, -1), (3, -1), (1, -1)]
    run_here(config, "export", "--tokens", "--out", str(tmp_path / "again.jsonl"))
    emptied(served)
    assert run_here(config, "import", str(tmp_path / "again.jsonl")) == 0
    assert stored_versions(served) == [(3, -1), (3, -1), (1, -1)], "an export does not make them the newest's own"


@pytest.mark.parametrize("end", [-2, 2**31, 1.5, "new", True])
def test_a_last_version_that_is_no_number_is_unusable(served, config, tmp_path: Path, capsys, end):
    (tmp_path / "rows.jsonl").write_text(json.dumps({**ROW, "version": 1, "version_end": end}))
    assert run_here(config, "import", str(tmp_path / "rows.jsonl")) == 1
    assert "version_end is no number of a version" in capsys.readouterr().err.replace("\n", " ")


def test_rewards_of_rows_that_other_weights_sampled_are_no_drop_of_the_newest_version(served, config, tmp_path: Path):
    bounds = BreakerConfig(reward_versions=2, reward_rows=1)
    record_ready(served, [row for version in range(4) for row in rows(4, version, name=f"v{version}-")])
    foreign = [{**ROW, "msg_id": f"x{number}", "version": 4 + number, "reward": 0.0} for number in range(40)]
    imported(config, tmp_path / "rows.jsonl", *foreign)
    found = served.fetch(rewards_by_version)
    assert [(one.version, one.count, one.mean) for one in found] == [(version, 4, 1.0) for version in range(4)]
    assert reward_drop(found, bounds) == 0.0


def test_a_reply_that_two_versions_sampled_is_in_the_rewards_of_neither(served):
    with served.write() as connection:
        for name, end in (("whole", 1), ("crossed", 3)):
            transitions.record(connection, [sample(name, version=1, version_end=end)])
            said = {"rule": RewardConfig(), "task_id": None, "run_id": None}
            transitions.apply_feedback(connection, msg_ids=[name], signals=[Signal("reward", value=0.5)], **said)
    (found,) = served.fetch(rewards_by_version)
    assert (found.version, found.count, found.mean) == (1, 1, 0.5)
