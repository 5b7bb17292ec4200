"""LearnConfig: the options of learn."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from flywheel.credit import Credit
from flywheel.errors import ConfigError


@dataclass(frozen=True)
class EarlyStop:
    """When evaluations stop learn: if none of the last `patience` exceeds the best one before by min_delta.

    at_least: not before a mean reward has reached this. Evaluations in which every run failed are ignored.

    >>> EarlyStop(patience=2).says_stop([0.5, 0.4, 0.5]), EarlyStop(patience=2).says_stop([0.5, 0.6, 0.4])
    (True, False)
    """

    patience: int = 5
    min_delta: float = 0.0
    at_least: float | None = None

    def __post_init__(self) -> None:
        patience: Any = self.patience
        if not isinstance(patience, Integral) or patience < 1:
            raise ConfigError(f"patience={patience!r}: give a whole number of 1 or more")

    def says_stop(self, means: list[float]) -> bool:
        """Whether the evaluations so far, oldest first, stop learn."""
        if len(means) <= self.patience or (self.at_least is not None and max(means) < self.at_least):
            return False
        return max(means[-self.patience :]) <= max(means[: -self.patience]) + self.min_delta


@dataclass(frozen=True)
class LearnConfig:
    """The options of learn and alearn.

    >>> LearnConfig(runs_per_task=8).with_options(seed=1).seed
    1
    >>> LearnConfig().with_options(run_per_task=8)
    Traceback (most recent call last):
    flywheel.errors.ConfigError: run_per_task is no option of learn; did you mean runs_per_task?
    """

    name: str = "learn"
    """Name of the tasks in the ledger, and of the folder runs/NAME."""
    runs_per_task: int = 1
    """Runs of a task that start and are committed together: a group."""
    epochs: int = 1
    """Number of times that each task is run."""
    at_once: int = 32
    """Concurrent runs."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Fields of chats that the workflow does not set, such as temperature."""
    credit: Credit = "once"
    """How a run's reward is assigned to its messages; see Run."""
    eval_every_versions: int = 20
    """Versions between evaluations on eval_tasks; the first and the last version are always evaluated."""
    eval_runs: int = 1
    """Runs of each task in an evaluation."""
    eval_params: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    """Fields of chats in an evaluation."""
    stop: EarlyStop | None = None
    """When evaluations stop learn."""
    max_ready_rows: int | None = None
    """READY rows, including those expected from runs in flight, above which no run is started; None: two batches of the
    trainer, or 1024 if its batch size is unknown."""
    require_trainer: bool = True
    """Whether to stop if no trainer has been alive for patience_s."""
    patience_s: float = 60.0
    """How long a trainer may be unavailable."""
    timeout_s: float = 600.0
    """Time limit of a run, then of its judge, and how long all engines may be out of service."""
    on_timeout: float | None = None
    """Reward of a run that exceeds timeout_s; None drops the run."""
    retries: int = 2
    """Further attempts after a failure; each is a new run."""
    max_failed_share: float = 0.2
    """Maximum share of failures among the last 50 attempts."""
    seconds: float | None = None
    """Time after which no run is started, and running ones are finished. None: until all tasks are done."""
    versions: int | None = None
    """Number of newer versions, counted from the one in service at the start, after which no run is started, and
    running ones are finished. None: until all tasks are done."""
    seed: int = 0
    """Seed of the order of the tasks."""
    progress: bool = True
    """Whether to show a line of progress."""

    def __post_init__(self) -> None:
        for name in ("runs_per_task", "epochs", "at_once", "eval_every_versions", "eval_runs", "retries", "versions"):
            value: Any = getattr(self, name)
            least = 0 if name == "retries" else 1
            if name == "versions" and value is None:
                continue
            if not isinstance(value, Integral) or value < least:
                raise ConfigError(f"{name}={value!r}: give a whole number of {least} or more")
        for name in ("max_ready_rows", "patience_s", "timeout_s", "on_timeout", "seconds"):
            is_needed = name in ("patience_s", "timeout_s")
            value = getattr(self, name)
            if not isinstance(value, Real if is_needed else (Real, type(None))) or value != value:  # a NaN
                raise ConfigError(f"{name}={value!r}: give a number")
        for name, kind, wanted in (
            ("name", str, "a text"),
            ("params", Mapping, "a mapping of fields of chats"),
            ("eval_params", Mapping, "a mapping of fields of chats"),
            ("stop", (EarlyStop, type(None)), "an EarlyStop, or None"),
        ):
            if not isinstance(value := getattr(self, name), kind):
                raise ConfigError(f"{name}={value!r}: give {wanted}")
        share: Any = self.max_failed_share
        if not isinstance(share, Real) or not 0 <= float(share) <= 1:
            raise ConfigError(f"max_failed_share={share!r}: give a share from 0 to 1")

    def with_options(self, **options: Any) -> LearnConfig:
        """Return the same with other options. Raises ConfigError for an unknown name."""
        known = [one.name for one in dataclasses.fields(self)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise ConfigError(f"{name} is no option of learn" + (f"; did you mean {near[0]}?" if near else ""))
        return dataclasses.replace(self, **options)

    @classmethod
    def load(cls, path: str | Path) -> LearnConfig:
        """Read the options from a JSON file; `stop` is an object with EarlyStop's fields. Raises ConfigError."""
        try:
            options = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        except OSError as exc:
            raise ConfigError(f"{path} cannot be read ({exc.strerror})") from exc
        except ValueError as exc:
            raise ConfigError(f"{path} is no JSON: {exc}") from exc
        if not isinstance(options, dict):
            raise ConfigError(f"{path} is no object with the options of learn")
        if isinstance(options.get("stop"), dict):
            try:
                options["stop"] = EarlyStop(**options["stop"])
            except TypeError as exc:
                raise ConfigError(f"{path}: stop has other fields than EarlyStop: {exc}") from exc
        return cls().with_options(**options)
