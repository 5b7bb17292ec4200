"""The breaker on a real trainer: a run spoiled on purpose publishes nothing worse, and goes on when it is told to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shared.config import load_config
from shared.experience import Experience
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import Tripped, count_by_state, find_trainer, ledger_status, list_versions, progress
from tests.support.even_odd import make_taught_model, reward_of_folder, sampled
from tests.support.experiences import record_ready, trainer_config
from tests.support.lives import Life, Lives
from tests.support.processes import wait_for, write_config

BATCH, HEALTHY_RATE = 16, 1e-4


@pytest.fixture(scope="module")
def taught(tmp_path_factory) -> Path:
    return make_taught_model(tmp_path_factory.mktemp("taught") / "base")


@pytest.fixture(scope="module")
def rows(taught) -> list[Experience]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(taught, dtype=torch.float32).eval()
    return sampled(model, np.random.default_rng(2), 3 * BATCH)


class Run:
    """A trainer's root folder."""

    def __init__(self, root: Path, lives: Lives, model: Path) -> None:
        self.root, self._lives, self._model = root, lives, model
        self.configure(learning_rate=100 * HEALTHY_RATE)

    def configure(self, **trainer: object) -> None:
        config = trainer_config(self.root, self._model, **{"batch_size": BATCH, "breaker": {}, **trainer})
        write_config(config, self.root / "flywheel.yaml")
        self.ledger = Ledger.open(load_config(self.root / "flywheel.yaml", {}).ledger_url)

    def begin(self, *arguments: str) -> Life:
        return self._lives.begin(
            ["trainer", "-c", str(self.root / "flywheel.yaml"), *arguments], self.root / "trainer.log"
        )

    def read(self, query, *arguments):
        with self.ledger.read() as connection:
            return query(connection, *arguments)

    @property
    def newest(self) -> int:
        return max((row.version for row in self.read(list_versions) if row.may_serve), default=-1)

    @property
    def tripped(self) -> dict | None:
        row = self.read(find_trainer, "trainer")
        return None if row is None else row.tripped

    def reward(self, version: int) -> float:
        return reward_of_folder(self.root / f"versions/v{version:06d}")


@pytest.fixture
def run(tmp_path, lives, taught) -> Run:
    return Run(tmp_path, lives, taught)


def test_a_spoiled_run_trips_before_a_worse_version_serves_and_goes_on_when_told_to(run, rows):
    record_ready(run.ledger, rows[:BATCH])
    with run.begin() as trainer:
        tripped = wait_for(lambda: run.tripped, "the breaker", 240)
        assert tripped["setting"] == f"trainer.breaker.{tripped['figure']}" and tripped["value"] > tripped["bound"]
        assert run.newest == 0 and run.read(count_by_state)["LEASED"] == BATCH
        assert run.read(ledger_status)["trainers"][0]["tripped"]["reason"] == tripped["reason"]
        record_ready(run.ledger, rows[BATCH:])  # chats, feedback and commits go on
        assert run.read(count_by_state)["READY"] == 2 * BATCH
        assert trainer.stop() == 0
    assert run.read(count_by_state)["READY"] == 3 * BATCH
    run.configure(learning_rate=HEALTHY_RATE)
    with run.begin() as trainer:
        wait_for(lambda: said(run.root).count("the breaker has tripped") == 2, "the restart to hold still", 240)
        assert run.newest == 0 and run.read(count_by_state)["READY"] == 3 * BATCH
        with run.begin("--resume") as command:
            assert command.wait(240) == 0
        wait_for(lambda: run.newest == 3, "all versions", 240)
        assert trainer.stop() == 0
    assert run.read(count_by_state)["CONSUMED"] == 3 * BATCH
    assert run.tripped is None
    assert run.reward(3) > run.reward(0) - 0.1
    shown = [json.loads(line) for line in (run.root / "trainer/trainer/figures.jsonl").read_text().splitlines()]
    assert [(line["step"], line["version"]) for line in shown] == [(1, 0), (1, 0), (2, 1), (3, 2)]
    assert shown[0]["change_of_update"] > 0.52 > max(line["change_of_update"] for line in shown[1:])


def test_without_its_breaker_the_same_run_serves_a_worse_version(run, rows):
    bounds = (
        "change_of_update", "kl_of_update", "kl_to_base", "min_entropy", "max_entropy", "policy_grad_norm",
        "critic_grad_norm",
    )  # fmt: skip
    run.configure(learning_rate=100 * HEALTHY_RATE, breaker=dict.fromkeys(bounds))
    record_ready(run.ledger, rows)
    with run.begin() as trainer:
        wait_for(lambda: run.newest == 3, "all versions", 240)
        assert trainer.stop() == 0
    assert min(run.reward(version) for version in (1, 2, 3)) < run.reward(0) - 0.1


def test_resume_starts_a_trainer_that_does_not_run(run, rows):
    record_ready(run.ledger, rows[:BATCH])
    with run.begin() as trainer:
        wait_for(lambda: run.tripped, "the breaker", 240)
        trainer.kill()
    run.configure(learning_rate=HEALTHY_RATE)
    with run.begin("--resume") as trainer:
        wait_for(lambda: run.newest == 1, "a version", 240)
        assert trainer.stop() == 0


def said(root: Path) -> str:
    return (root / "trainer.log").read_text()


def test_explorers_show_which_figure_holds_a_trainer(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url]).wait_ready()
    fix = "lower trainer.learning_rate"
    tripped = {"figure": "kl_of_update", "reason": "kl_of_update=9 is above its bound", "fix": fix}
    with explorer.ledger.write() as connection:
        about = {"step": 0, "version": 0, "state_path": None, "state_sha256": None}
        transitions.announce_trainer(connection, name="t", **about)
        transitions.trip_breaker(connection, name="t", tripped=tripped)
        transitions.announce_trainer(connection, name="t", **about)  # a restart changes nothing of it
    shown = f'flywheel_update_tripped_trainers{{figure="kl_of_update",fix="{fix}"}}'
    assert explorer.http.get("/status").json()["trainers"][0]["tripped"] == tripped
    wait_for(lambda: f"{shown} 1.0" in explorer.http.get("/metrics").text, "the metric", 60)
    with explorer.ledger.write() as connection:
        assert transitions.reset_breaker(connection, name="t")
        assert not transitions.reset_breaker(connection, name="t"), "it had not tripped"
    wait_for(lambda: f"{shown} 0.0" in explorer.http.get("/metrics").text, "the metric after a look", 60)


def test_the_metrics_are_of_the_trainers_that_live_or_else_of_the_last_one(ledger):
    def announce(name: str, step: int) -> None:
        about = {"step": step, "version": step, "state_path": None, "state_sha256": None}
        with ledger.write() as connection:
            transitions.announce_trainer(connection, name=name, **about)

    def counted() -> tuple[int, list[Tripped]]:
        found = ledger.fetch(progress)
        return found.step, found.tripped

    assert counted() == (0, [])
    announce("given up", 500)
    with ledger.write() as connection:
        transitions.trip_breaker(connection, name="given up", tripped={"figure": "reward_drop", "fix": "look"})
        transitions.dismiss_trainer(connection, name="given up")
    assert counted() == (500, [Tripped("reward_drop", "look")]), "a trainer that is down is still held"
    announce("second", 7)
    assert counted() == (7, [])
    with ledger.write() as connection:
        transitions.dismiss_trainer(connection, name="second")
    assert counted() == (7, [])
    announce("given up", 500)
    announce("second", 7)
    assert counted() == (500, [Tripped("reward_drop", "look")])
