"""MLflow and Weights & Biases themselves take a trainer's figures, where somebody has installed them."""

from __future__ import annotations

import re

import pytest

from shared.config import TrainerConfig
from trainer_service.watch.record import Record
from trainer_service.watch.writer import Watch


def write_three_updates(folder, **settings) -> None:
    watch = Watch(TrainerConfig(watch={"timeout_s": 120, **settings}), folder)
    for step in (1, 2, 3):
        watch.write(Record(step, step, 1e9 + step, {"reward_mean": step / 4}, {"train": 1.0}, {"reward": 2}))
    watch.close()


@pytest.mark.filterwarnings("default")  # what its own database code warns of
def test_mlflow_holds_each_updates_figures_in_a_run_of_the_trainers_name(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow-skinny")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    write_three_updates(tmp_path, mlflow=uri)
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("trainer").experiment_id])
    assert (run.info.run_name, run.info.status) == ("trainer", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "reward_mean")
    assert [(one.step, one.value, one.timestamp) for one in history] == [
        (step, step / 4, 1_000_000_000_000 + 1000 * step) for step in (1, 2, 3)
    ]
    assert run.data.metrics["seconds/train"] == 1.0 and run.data.metrics["signals/reward"] == 2.0


@pytest.mark.filterwarnings("default")
def test_wandb_holds_each_updates_figures_in_a_run_of_the_trainers_name(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")  # its own form of a run, for a later `wandb sync`
    write_three_updates(tmp_path, wandb="learning")
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    data = file.read_bytes()
    assert b"learning" in data and b"trainer" in data
    found = re.findall(rb"reward_mean[^0-9]{1,8}([0-9.]+)", data)  # of an update, and as the last one known
    assert list(dict.fromkeys(found)) == [b"0.25", b"0.5", b"0.75"]
