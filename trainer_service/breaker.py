"""The breaker: bounds on the figures of an update, checked between update and publish.

If a figure crosses its bound, nothing is published or consumed, and the last good version stays in service until an
operator resumes the trainer (`flywheel trainer --resume`). The trainer's row in the ledger stores this, so that a
restart does not resume it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection

from shared.config import BreakerConfig, TrainerConfig
from shared.errors import LedgerError, StartupError
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import Rewards, TrainerRow
from shared.log import StageLogger
from shared.stop_request import StopRequest
from trainer_service.errors import Stopped
from trainer_service.patience import PatientLedger
from trainer_service.watch.record import Record

log = StageLogger("update")

_RATE = "lower trainer.learning_rate"
_BOUNDS = {  # setting: the figure, and the fix, to which _fixes adds settings of the algorithms in use
    "change_of_update": ("change_of_update", f"{_RATE}, or trainer.epochs, or raise trainer.batch_size"),
    "kl_of_update": ("kl_of_update", _RATE),
    "kl_to_base": ("kl_to_base", _RATE),
    "min_entropy": ("entropy_after", _RATE),
    "max_entropy": ("entropy_after", _RATE),
    "policy_grad_norm": ("grad_norm_policy", f"check the rewards for outliers, or {_RATE}"),
    "critic_grad_norm": (
        "grad_norm_critic",
        "check the rewards for outliers, or lower the critic's learning rate",
    ),
    "logprob_gap": (
        "logprob_gap_mean",
        "check that the engine computes what the trainer does: precision, version",
    ),
    "outside_cut": (
        "outside_cut",
        "check that the engine samples as its rows say: precision, version, parameters",
    ),
    "reward_drop": ("reward_drop", "check the newest rewards: the model became worse, or its tasks changed"),
}


@dataclass(frozen=True, slots=True)
class Trip:
    """A bound that was crossed."""

    figure: str
    value: float
    setting: str  # name of the bound
    bound: float
    fix: str
    step: int  # the update that crossed it
    version: int  # the last published version

    @property
    def found(self) -> str:
        """The figure, its bound and the fix."""
        side = "below" if self.value < self.bound else "above"
        return (
            f"{self.figure}={self.value:.4g} is {side} {self.setting}={self.bound:g} in update {self.step}; {self.fix}"
        )

    @property
    def reason(self) -> str:
        """One line: what was found, and how to resume the trainer."""
        return (
            f"{self.found}; restart the trainer if its settings changed, and continue with `flywheel trainer --resume`"
        )


class Breaker:
    """The breaker of one trainer."""

    def __init__(
        self,
        config: TrainerConfig,
        ledger: Ledger,
        patient: PatientLedger,
        stop: StopRequest,
        show: Callable[[Mapping[str, Any] | None], None],
    ) -> None:
        """show: called with the bound that was crossed, and with None after an operator resumed the trainer."""
        self._name, self._poll_interval_s, self._bounds = config.name, config.poll_interval_s, config.breaker
        self._ledger, self._patient, self._stop = ledger, patient, stop
        self._show, self._fixes = show, _fixes(config)
        self._since: int | None = None  # newest version when an operator last resumed the trainer

    def check(self, record: Record, without: Collection[str] = ()) -> Trip | None:
        """Return the first bound that an update's figures cross; None: the result may be published.

        without: settings whose bounds are ignored. Adds the figure reward_drop to the record.
        """
        figures, since = record.figures, self._since
        drop = reward_drop([r for r in record.rewards if since is None or r.version > since], self._bounds)
        if drop is not None:
            figures["reward_drop"] = drop
        for setting, (figure, _) in _BOUNDS.items():
            bound, value = getattr(self._bounds, setting), figures.get(figure)
            if bound is None or value is None or setting in without:
                continue
            if (value < bound) if setting.startswith("min_") else (value > bound):
                about = (bound, self._fixes[setting], record.step, record.version)
                return Trip(figure, value, f"trainer.breaker.{setting}", *about)
        return None

    def hold(self, trip: Trip) -> None:
        """Record the crossed bound in the ledger and the log, and wait until an operator resumes. Raises Stopped."""
        tripped = asdict(trip) | {"reason": trip.reason}
        self._patient.write(lambda c: transitions.trip_breaker(c, name=self._name, tripped=tripped))
        self.wait()

    def require_free(self) -> None:
        """Raise StartupError if the ledger says that the breaker has tripped."""
        row = self._patient.write(self._find)
        if row is not None and row.tripped is not None:
            reason = row.tripped["reason"]
            raise StartupError(f"the breaker of trainer {self._name!r} has tripped: {reason}, then train again")
        self._since = None if row is None else row.resumed_version

    def wait(self) -> None:
        """Wait while the ledger says that the breaker has tripped. Raises Stopped."""
        row = self._patient.write(self._find)
        if row is not None and row.tripped is not None:
            self._show(row.tripped)
            log.error("the breaker has tripped; nothing is published or consumed", reason=row.tripped["reason"])
            while row is None or row.tripped is not None:
                if self._stop.wait(self._poll_interval_s):
                    raise Stopped
                row = self._read()
            self._show(None)
            log.info("going on after a look")
        self._since = None if row is None else row.resumed_version

    def _read(self) -> TrainerRow | None:
        try:
            return self._ledger.fetch(self._find)
        except LedgerError:
            return None

    def _find(self, connection: Connection) -> TrainerRow | None:
        return queries.find_trainer(connection, self._name)


def _fixes(config: TrainerConfig) -> dict[str, str]:
    """Return by bound what to change, of settings that the algorithms in use have."""
    parts = {f"trainer.{name}": config.settings_of(name) for name in config.parts}
    hold = [f"{key}.{name}" for key, part in parts.items() for name in ("kl_coef", "beta") if hasattr(part, name)]
    entropy = {f"{key}.entropy_coef": part.entropy_coef for key, part in parts.items() if hasattr(part, "entropy_coef")}
    of_algorithms = {
        "kl_to_base": ("raise", hold),
        "min_entropy": ("raise", [*entropy]),
        "max_entropy": ("lower", [key for key, value in entropy.items() if value > 0]),
    }
    more = {bound: f", or {verb} {' or '.join(keys)}" for bound, (verb, keys) in of_algorithms.items() if keys}
    return {bound: fix + more.get(bound, "") for bound, (_, fix) in _BOUNDS.items()}


def reward_drop(rewards: Sequence[Rewards], bounds: BreakerConfig) -> float | None:
    """Return how far the mean reward of the last versions is below that of the versions before, in standard deviations.

    The deviation is over both. A drop from one constant reward to another gives 2 if both means have equal counts.
    Returns None if there are too few versions or rows.
    """
    last = rewards[-bounds.reward_versions :]
    before = rewards[-2 * bounds.reward_versions : -bounds.reward_versions]
    counts = [sum(r.count for r in part) for part in (before, last)]
    if len(before) < bounds.reward_versions or min(counts) < bounds.reward_rows:
        return None
    means = [sum(r.count * r.mean for r in part) / n for part, n in zip((before, last), counts, strict=True)]
    both = [*before, *last]
    mean = sum(r.count * r.mean for r in both) / sum(counts)
    variance = sum(r.count * r.mean_square for r in both) / sum(counts) - mean**2
    if variance <= 1e-12 * mean**2:
        return 0.0
    return (means[0] - means[1]) / math.sqrt(variance)
