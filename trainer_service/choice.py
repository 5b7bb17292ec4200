"""`algorithm: auto`: choose algorithms by the signals that callers send.

A trainer chooses before its first update, by the signals in the ledger. If a batch contains a kind of signal that no
algorithm in use learns from, the trainer adds one and is built again. No algorithm is ever removed. The choice is
stored in the trainer's row in the ledger, so that a restart keeps it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

from shared.config import AUTO, CHOICES, Config, TrainerConfig
from shared.experience import JSON, Experience, Lease
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import TrainerRow
from shared.log import StageLogger
from shared.reward import Kind, has_effect, lessons_of
from shared.stop_request import StopRequest
from trainer_service.errors import Stopped
from trainer_service.patience import PatientLedger

log = StageLogger("trainer")
_OF_KIND = {"comment": "hint", "correction": "sft", "demonstration": "sft", "preferred_over": "dpo"}


def choose(kinds: Collection[str], *, repeats: bool, before: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return algorithms for these kinds of signals, with the weights of their losses: `before` and what it lacks.

    repeats: whether tasks are attempted several times.
    """
    names = set(before or {})
    if {"reward", "metric"} & set(kinds) and not names & {"grpo", "reinforce_pp"}:
        names.add("grpo" if repeats else "reinforce_pp")
    elif "rating" in kinds and not names & {"grpo", "reinforce_pp", "kto"}:
        names.add("grpo" if repeats else "kto")
    names |= {_OF_KIND[kind] for kind in kinds if kind in _OF_KIND}
    return {name: weight for name, weight in CHOICES.items() if name in names}


def is_open(config: TrainerConfig) -> bool:
    """Whether the algorithms are still to be chosen."""
    return config.algorithm == AUTO and not config.algorithms


def with_choice(config: Config, algorithms: Mapping[str, float]) -> Config:
    """Return the configuration with these algorithms."""
    trainer = config.trainer.model_copy(update={"algorithms": dict(algorithms)})
    return config.model_copy(update={"trainer": trainer})


def chosen(config: Config, ledger: Ledger, row: TrainerRow | None, stop: StopRequest) -> Config:
    """Return the configuration with the trainer's choice: from its row, or else by recent signals. Raises Stopped.

    Without a choice it waits for a signal that an algorithm learns from.
    """
    if not is_open(config.trainer):
        return config
    if row is not None and row.chosen is not None:
        return with_choice(config, row.chosen["algorithms"])
    patient, waits = PatientLedger(ledger, stop, config.trainer.poll_interval_s), False
    while True:
        kinds = _learnable(patient.write(partial(queries.recent_kinds, metrics=config.reward.metrics)), config)
        if kinds:
            repeats = patient.write(queries.tasks_repeat)
            algorithms = choose(kinds, repeats=repeats)
            log.info("algorithms chosen by what was said", algorithms=_shown(algorithms), kinds=_shown(kinds))
            return with_choice(config, algorithms)
        if not waits:
            log.info("waiting for feedback, to choose algorithms by it")
        waits = True
        if stop.wait(config.trainer.poll_interval_s):
            raise Stopped


def chosen_for(config: Config, rows: Iterable[Experience], row: TrainerRow | None) -> Config:
    """Return the configuration with a choice by the signals of these rows, besides the trainer's choice in its row."""
    if not is_open(config.trainer):
        return config
    rows = list(rows)
    said = (signal for row in rows for signal in row.signals if has_effect(signal, config.reward.metrics))
    kinds = _learnable(Counter(signal.kind for signal in said), config)
    before = None if row is None or row.chosen is None else row.chosen["algorithms"]
    repeats = queries.do_repeat(rows)
    algorithms = choose(kinds, repeats=repeats, before=before)
    log.info("algorithms chosen by what was said", algorithms=_shown(algorithms), kinds=_shown(kinds))
    return with_choice(config, algorithms)


def as_row(config: TrainerConfig) -> JSON | None:
    """Return the choice as the trainer's row stores it; None: nothing was chosen."""
    return {"algorithms": dict(config.algorithms)} if config.algorithm == AUTO else None


def extend_choice(ledger: PatientLedger, config: Config, lease: Lease) -> bool:
    """Extend the choice if a batch has signals that no algorithm in use learns from. Returns whether it did."""
    settings = config.trainer
    if settings.algorithm != AUTO:
        return False
    log_of = ledger.write(lambda connection: queries.load_signals(connection, lease.rows))
    acting: Counter[Kind] = Counter()
    for row in lease.rows:
        log_of_row = (s for s in log_of[row.msg_id, row.choice] if has_effect(s, config.reward.metrics))
        acting.update(s.kind for s in log_of_row if lessons_of([s.kind]) & row.acts)
    new = {kind: n for kind, n in _learnable(acting, config).items() if kind not in settings.learns_from}
    if not new:
        return False
    repeats = ledger.write(queries.tasks_repeat)
    algorithms = choose(new, repeats=repeats, before=settings.algorithms)
    choice: dict[str, Any] = {"algorithms": algorithms}
    ledger.write(lambda connection: transitions.choose_algorithms(connection, name=settings.name, chosen=choice))
    log.info("algorithms added for what is said now", algorithms=_shown(algorithms), kinds=_shown(new))
    return True


def _learnable(kinds: Mapping[Kind, int], config: Config) -> dict[Kind, int]:
    """Return the kinds that some algorithm can learn from."""
    learned = config.trainer.model_copy(update={"algorithms": {}}).learns_from
    return {kind: count for kind, count in kinds.items() if kind in learned}


def _shown(amounts: Mapping[Any, float]) -> str:
    return ", ".join(f"{name}: {amount:g}" for name, amount in amounts.items())
