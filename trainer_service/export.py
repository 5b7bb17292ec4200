"""An export's rows as a trainer's batches: signals become credit by the same rules as in the ledger.

All rows are in memory. Does not use models or a ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shared.config import Config, TrainerConfig
from shared.errors import StartupError
from shared.experience import Experience, Other, State, TrajectoryKey, choice_name, trajectory_key
from shared.ledger.conditions import split_name
from shared.ledger.given import (
    UNUSABLE,
    choice_of,
    names_of,
    number_of,
    quarantine_of,
    signals_of,
    time_of,
    tokens_of,
    version_end_of,
)
from shared.ledger.queries.lease import check_rewards, rewarded_rows
from shared.ledger.queries.preferences import prefer
from shared.ledger.row_files import read_rows
from shared.log import StageLogger
from shared.reward import EVERY_LESSON, Lesson, Signal, credit_of, has_effect
from shared.tokenizer import tokenizer_digest

log = StageLogger("train")
_TOKENLESS = "without tokens"
# In place of a left-out row's tokens, which may be damaged: its names and signals are still read.
_HARMLESS: dict[str, Any] = {"prompt_ids": [0], "reply_ids": [0], "logprobs": [0.0], "sampling": {}}


def read_export(file: Path, config: Config, model: Path) -> list[Experience]:
    """Return the rows of an export that can be trained on. model: folder of the model whose tokenizer they must use.

    Raises StartupError if no row has tokens, or some are of another tokenizer.
    """
    ours = tokenizer_digest(model)
    rows, left_out, said = [], Counter[str](), Counter[str]()
    others: list[Experience] = []  # discarded ones, over which a reply may be preferred
    lost: set[tuple[TrajectoryKey, Signal]] = set()  # corrections of wholes whose last reply is left out
    for number, row in enumerate(read_rows(file), start=1):
        _require_tokenizer(f"{file}, row {number}", row, ours, model)
        if row.get("state") == State.DISCARDED:
            reason: str = State.DISCARDED
            with suppress(*UNUSABLE):
                others += [] if quarantine_of(row) else [_experience(number, row, config)[0]]
        elif row.get("prompt_ids") is None:
            reason = _TOKENLESS
        else:
            try:
                rows.append(_experience(number, row, config))
                said.update({signal.kind for signal in signals_of(row, config.reward)})
                lost -= _whole_corrections(rows[-1][0])
                continue
            except UNUSABLE as exc:
                reason = f"unusable ({exc})"
        left_out[reason] += 1
        with suppress(*UNUSABLE):
            lost |= _whole_corrections(_experience(number, {**row, **_HARMLESS}, config)[0])
    if not rows:
        remedy = "export it again with --tokens"
        if left_out[_TOKENLESS]:
            remedy += "; `flywheel import` gives rows of messages their tokens"
        raise StartupError(f"{file}: no row has tokens ({_shown(left_out)}); {remedy}")
    rows = [(_without(row, lost), teaches) for row, teaches in rows]
    spoken_of = {trajectory_key(row) for row, teaches in rows if teaches}
    chosen = [row for row in _with_preferences(_acting(rows), others) if trajectory_key(row) in spoken_of]
    left_out["of which nothing was said that is learned from"] += len(rows) - len(chosen)
    log.info("rows read", file=str(file), rows=len(chosen), left_out=_shown(left_out))
    if not chosen:
        raise StartupError(
            f"{file}: nothing was said of its rows that {', '.join(config.trainer.parts)} learns from; choose another "
            f"trainer.algorithm (its rows have {counted(said)}; {learns_from(config.trainer)})"
        )
    return chosen


def _require_tokenizer(place: str, row: dict[str, Any], ours: str | None, model: Path) -> None:
    theirs = row.get("tokenizer")
    if theirs is not None and theirs != ours:
        raise StartupError(
            f"{place}: its tokens are of the tokenizer {theirs}, and {model} has {ours}; set model.path to the model "
            "that the export is of"
        )


def _experience(number: int, row: dict[str, Any], config: Config) -> tuple[Experience, int]:
    """Return a row of an export, and its lessons (shared.reward.Lesson). Raises CorruptTokens and data errors."""
    tokens, sampling = tokens_of(row)
    tokens.check(max_tokens=config.trainer.max_trajectory_tokens)
    sampling.check()
    signals, learned = signals_of(row, config.reward), config.trainer.learns_from
    credit = credit_of(signals, config.reward, learned)
    check_rewards(credit.reward, credit.turn_reward, credit.outcome)
    names = names_of(row)
    msg_id, choice = choice_of(row, names["msg_id"] or f"row-{number}")
    experience = Experience(
        id=number,
        msg_id=msg_id,
        choice=choice,
        parent_id=names["parent_id"],
        task_id=names["task_id"],
        run_id=names["run_id"],
        conversation_id=names["conversation_id"] or choice_name(msg_id, choice),
        version=number_of(row, "version"),
        version_end=version_end_of(row),
        reward=credit.reward,
        created_at=time_of(row, 0.0),
        tokens=tokens,
        sampling=sampling,
        turn_reward=credit.turn_reward,
        outcome=credit.outcome,
        key_group=names["key_group"],
        key_name=names["key_name"],
        finish_reason=names["finish_reason"],
        signals=tuple(one for one in signals if one.kind in learned and has_effect(one, config.reward.metrics)),
    )
    return experience, credit.teaches


def _whole_corrections(row: Experience) -> set[tuple[TrajectoryKey, Signal]]:
    return {(trajectory_key(row), one) for one in row.signals if one.kind == "correction" and one.scope != "message"}


def _without(row: Experience, lost: set[tuple[TrajectoryKey, Signal]]) -> Experience:
    """Return the row without corrections that are about a reply that is left out."""
    kept = tuple(one for one in row.signals if (trajectory_key(row), one) not in lost)
    return row if len(kept) == len(row.signals) else replace(row, signals=kept)


def _acting(rows: list[tuple[Experience, int]]) -> list[Experience]:
    """Set what acts on each row, as at a claim: all lessons, except rewards that teach nothing."""
    rewarded = rewarded_rows(rows, lambda first: {row.id: row.tokens.prompt_ids.tobytes() for row in first})
    unrewarded = EVERY_LESSON & ~int(Lesson.REWARD)
    return [row if row.id in rewarded else replace(row, acts=unrewarded, outcome=None) for row, _ in rows]


def _with_preferences(rows: list[Experience], discarded: list[Experience]) -> list[Experience]:
    """Add to the rows the replies in the file that they are preferred over, also discarded ones."""
    found: dict[str, list[Experience]] = {}
    for row in [*rows, *discarded]:
        found.setdefault(row.msg_id, []).append(row)
    every = (row for choices in found.values() for row in choices)
    others = {row.id: Other(choice_name(row.msg_id, row.choice), row.tokens, row.sampling) for row in every}
    return prefer(rows, found, others, {(row.msg_id, row.choice): row.signals for row in discarded})


def _shown(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "none"


def counted(counts: Mapping[str, int]) -> str:
    """Format the number of rows for each kind of signal."""
    return ", ".join(f"{name}: {count}" for name, count in counts.items()) or "no signals"


def learns_from(config: TrainerConfig) -> str:
    """Format what each algorithm in use learns from."""
    return "; ".join(
        f"{name} learns from {', '.join(sorted(config.settings_of(name).learned))}" for name in config.parts
    )


def batches_of(rows: Iterable[Experience], config: Config, epoch: int) -> list[list[Experience]]:
    """Return the batches of one epoch: whole trajectories, or whole tasks, in an order that depends on the seed.

    Where whole tasks are kept together, choices of one message without a task are, too.
    """
    settings = config.trainer
    together: dict[TrajectoryKey, list[Experience]] = {}
    for row in rows:
        key = trajectory_key(row)
        if settings.together == "task":
            key = (split_name(row.conversation_id)[0],) if row.task_id is None else (None, row.task_id)
        together.setdefault(key, []).append(row)
    groups = list(together.values())
    batches: list[list[Experience]] = [[]]
    for number in np.random.default_rng([settings.seed, epoch]).permutation(len(groups)):
        if len(batches[-1]) >= settings.batch_size:
            batches.append([])
        batches[-1] += groups[number]
    return batches
