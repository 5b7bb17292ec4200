"""MLflow: a tracking server or its database. Credentials come from MLflow's own environment variables."""

from __future__ import annotations

from trainer_service.watch.record import Record


class MLflow:
    """A run in the experiment with the trainer's name."""

    def __init__(self, uri: str, trainer: str) -> None:
        """Raises ImportError, and the errors of mlflow if its server is unavailable."""
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(trainer)
        experiment = self._client.create_experiment(trainer) if known is None else known.experiment_id
        self._run = self._client.create_run(experiment, run_name=trainer).info.run_id

    def write(self, record: Record) -> None:
        at_ms = int(record.at * 1000)
        metrics = [self._metric(name, value, at_ms, record.step) for name, value in record.flat().items()]
        self._client.log_batch(self._run, metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)
