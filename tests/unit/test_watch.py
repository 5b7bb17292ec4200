"""Figures reach every place that is configured, and nothing that happens there reaches training."""

from __future__ import annotations

import json
import sys
import threading
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from shared.config import TrainerConfig, WatchConfig
from shared.errors import ConfigError, StartupError
from shared.ledger.queries import Rewards
from shared.reward import Signal
from tests.support.experiences import rows
from tests.support.processes import wait_for
from tests.support.records import record
from tests.support.servers import free_port
from trainer_service.watch.jsonl import JsonLines
from trainer_service.watch.prometheus import TrainerMetrics
from trainer_service.watch.record import Record
from trainer_service.watch.writer import QUEUED, Outside, Watch, close_all, require_packages


def watch(folder: Path, **settings: object) -> Watch:
    return Watch(TrainerConfig(watch=WatchConfig(**settings)), folder)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "figures.jsonl").read_text().splitlines()]


def test_each_update_is_a_line_with_the_seconds_of_its_stages(tmp_path):
    writer = watch(tmp_path)
    with writer.stage("publish"):
        pass
    one = record(kl_of_update=0.5)
    one.rewards = [Rewards(5, 3, 0.25, 0.25)]
    writer.write(one)
    writer.write(record(step=8))
    writer.close()
    first, second = lines(tmp_path)
    assert (first["step"], first["version"], first["kl_of_update"]) == (7, 6, 0.5)
    assert first["reward_by_version"] == {"5": 0.25} and first["signals"] == {"reward": 3}
    assert first["seconds"].keys() == {"train", "publish"}
    assert (second["step"], second["seconds"].keys()) == (8, {"train"})


def test_signals_of_rehearsed_rows_are_not_counted_again():
    said = {"comment": 1, "correction": 0}
    new, old = rows(2)
    new = replace(new, signals=(Signal("comment", text="w1"), Signal("comment", text="w2")))
    old = replace(old, signals=(Signal("correction", text="w1"),), is_rehearsal=True)
    costs = {"tokens_in": 0.0, "tokens_computed": 0.0, "precompute_seconds": 0.0, "train_seconds": 0.0}
    made = Record.of([new, old], {}, costs, [], step=1, version=0)
    assert {kind: made.signals.get(kind, 0) for kind in said} == said


def test_a_full_file_is_rotated_and_only_two_are_kept(tmp_path):
    sink = JsonLines(tmp_path, max_bytes=500)
    for step in range(30):
        sink.write(record(step=step))
    assert {file.name for file in tmp_path.iterdir()} == {"figures.jsonl", "figures.1.jsonl"}
    assert all(file.stat().st_size < 800 for file in tmp_path.iterdir())
    assert lines(tmp_path)[-1]["step"] == 29


def test_a_line_that_a_crash_cut_short_spoils_no_other(tmp_path):
    (tmp_path / "figures.jsonl").write_bytes(b'{"step": 1}\n{"st')
    JsonLines(tmp_path, max_bytes=10_000).write(record(step=2))
    assert (tmp_path / "figures.jsonl").read_text().splitlines()[1] == '{"st'
    assert json.loads((tmp_path / "figures.jsonl").read_text().splitlines()[2])["step"] == 2


def test_prometheus_shows_no_figure_that_the_last_update_does_not_have():
    metrics = TrainerMetrics()
    metrics.write(record(logprob_gap_mean=0.25, entropy_after=0.5))
    metrics.write(record(entropy_after=0.25))
    shown = generate_latest(metrics.registry).decode()
    assert 'flywheel_update_figure_number{figure="entropy_after"} 0.25' in shown
    assert "logprob_gap_mean" not in shown


def test_prometheus_exports_figures_rewards_by_version_and_the_breaker_s_reason(tmp_path):
    port = free_port()
    writer = watch(tmp_path, port=port)
    one = record(rows=8.0, rows_unused=2.0, entropy_after=0.5)
    one.rewards = [Rewards(version, 1, version / 100, 0.0) for version in range(40)]
    writer.write(one)
    fix = "lower trainer.learning_rate"
    writer.show_trip({"figure": "kl_of_update", "setting": "trainer.breaker.kl_of_update", "fix": fix})
    shown = scrape(port)
    assert 'flywheel_update_figure_number{figure="entropy_after"} 0.5' in shown
    assert 'flywheel_update_rows_total{use="trained"} 6.0' in shown
    labels = f'bound="trainer.breaker.kl_of_update",figure="kl_of_update",fix="{fix}"'
    assert f"flywheel_update_tripped_number{{{labels}}} 1.0" in shown
    assert next(line for line in shown if line.startswith("flywheel_update_reward_mean{")).endswith('"24"} 0.24')
    writer.show_trip(None)
    assert not any(line.startswith("flywheel_update_tripped_number{") for line in scrape(port))
    writer.close()


def scrape(port: int) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return answer.read().decode().splitlines()


def test_a_port_that_is_taken_is_refused_at_the_start(tmp_path):
    first = watch(tmp_path, port=(port := free_port()))
    with pytest.raises(StartupError, match=f"trainer.watch.port={port} cannot be listened on"):
        watch(tmp_path, port=port)
    first.close()


def test_an_unwritable_folder_stops_nothing_and_is_logged_once(tmp_path, caplog):
    writer = watch(tmp_path / "missing")
    writer.write(record())
    writer.write(record())
    assert sum("figures cannot be written" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("key", ["tensorboard", "wandb", "mlflow"])
def test_a_package_that_is_configured_and_missing_is_named_at_the_start(key, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, key, raising=False)
    refusal = f"trainer.watch.{key} is set, and the package {key} is not installed; install it"
    with pytest.raises(ConfigError, match=refusal) as error:
        require_packages(WatchConfig(**{key: True if key == "tensorboard" else "http://u:secret@here"}))
    assert "secret" not in str(error.value)


class Kept:
    """A place that keeps what it gets."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.closed = False

    def write(self, one) -> None:
        self.steps.append(one.step)

    def close(self) -> None:
        self.closed = True


class Failing(Kept):
    def write(self, one) -> None:
        raise RuntimeError("no such project")


def test_a_place_that_fails_is_left_out_and_the_others_go_on(caplog):
    kept = Kept()

    def cannot_begin() -> Kept:
        raise ConnectionError("no server at https://u:secret@host:1/x")

    outputs = [Outside("A", cannot_begin), Outside("B", Failing), Outside("C", lambda: kept)]
    for step in range(3):
        for output in outputs:
            output.put(record(step=step))
    close_all(outputs, timeout_s=60)
    assert kept.steps == [0, 1, 2] and kept.closed
    (said,) = (m for m in caplog.messages if "no longer sent" in m and "where=A" in m)
    assert "no server at https://…@host:1/x" in said
    assert sum("where=B" in m for m in caplog.messages) == 1


def test_an_output_that_hangs_delays_neither_updates_nor_the_exit(caplog):
    entered, free = threading.Event(), threading.Event()

    class Hanging(Kept):
        def write(self, one) -> None:
            entered.set()
            free.wait()

    kept = Kept()
    outputs = [Outside("far away", Hanging), Outside("here", lambda: kept)]
    outputs[0].put(record())
    wait_for(entered.is_set, "the place to hang", 60)
    for _ in range(QUEUED + 2):
        outputs[0].put(record())
    outputs[1].put(record(step=7))
    wait_for(lambda: kept.steps, "the figures of another output", 60)
    close_all(outputs, timeout_s=0)
    assert kept.steps == [7]
    assert sum("figures are left out" in m and "where='far away'" in m for m in caplog.messages) == 1
    free.set()
