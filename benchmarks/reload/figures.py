"""The figures of turns: failed replies, and the spread of gaps and first tokens."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import select

from benchmarks.reload.service import Service
from benchmarks.reload.turn import TOKENS, Turn
from shared.experience import Tokens
from shared.ledger.tables import experiences, payloads

BOUND_MS = 50  # above a turn without a load: of adapters, and of two engines


def row_to_first_chat(turn: Turn) -> float:
    """Seconds from the version's row until a caller received the first token of a chat that only it answered.

    Infinite if it answered none.
    """
    answered = [chat.first_token_at for chat in turn.late if chat.version == turn.published]
    return min(answered, default=math.inf) - turn.row_at


def longest_gap_s(turn: Turn) -> float:
    """The longest gap of a turn's streams."""
    return max(stream.longest_gap_s for stream in turn.streams)


def slowest_first_s(turn: Turn) -> float:
    """The slowest first token of a turn's short chats, since each was due; infinite if one of them has no token."""
    return max(chat.first_token_s for chat in turn.late)


def above_ms(of: Callable[[Turn], float], pairs: Sequence[tuple[Turn, Turn]]) -> list[float]:
    """By how much the figure of the first turn of each pair is above that of the second; not finite: unknown."""
    return [1000 * (of(one) - of(other)) for one, other in pairs]


def compare(differences: list[float]) -> dict[str, Any]:
    """The spread of above_ms, the share within BOUND_MS, and those beyond. An unknown one is not within the bound."""
    beyond = sorted(round(value) for value in differences if math.isfinite(value) and value > BOUND_MS)
    within = sum(value <= BOUND_MS for value in differences)
    return spread(differences) | {"within_bound": within / max(1, len(differences)), "beyond": beyond}


def row_to_first_token(turn: Turn, crossed: set[str]) -> float:
    """Seconds from the version's row until a caller received a token of it.

    crossed: message ids of the streams whose last token is of a newer version than their first one.
    """
    assert turn.began_at is not None
    resumed = [stream.resumed_at(turn.row_at) - turn.row_at for stream in turn.streams if stream.msg_id in crossed]
    return min([row_to_first_chat(turn), *resumed])


def read_crossed(service: Service) -> set[str]:
    """The message ids of replies that two versions sampled."""
    with service.ledger.read() as connection:
        rows = connection.execute(select(experiences.c.msg_id).where(experiences.c.version_end > experiences.c.version))
        return {row.msg_id for row in rows}


def read_recorded(service: Service, turns: dict[str, list[Turn]]) -> dict[str, list[int]]:
    """The tokens of replies in the ledger, by message id."""
    ids = {stream.msg_id for of in turns.values() for turn in of for stream in turn.streams}
    with service.ledger.read() as connection:
        rows = connection.execute(select(experiences.c.msg_id, payloads.c.tokens).join(payloads)).all()
    return {row.msg_id: Tokens.decode(row.tokens).reply_ids.tolist() for row in rows if row.msg_id in ids}


def count_failed(turns: Sequence[Turn]) -> int:
    """The streams and short chats that failed."""
    return sum(each.failed is not None for turn in turns for each in (*turn.streams, *turn.late))


def summarize(turns: list[Turn], recorded: dict[str, list[int]]) -> dict[str, Any]:
    """The figures of one kind of turns. recorded: the tokens of replies in the ledger, by message id."""
    late = [chat for turn in turns for chat in turn.late]
    streams = [stream for turn in turns for stream in turn.streams]
    whole = [stream for stream in streams if not stream.failed]
    return {
        "turns": len(turns),
        "replies": len(streams),
        "late_chats": len(late),
        "failed": count_failed(turns),
        "late_failed": sum(chat.failed is not None for chat in late),
        "truncated": sum(len(stream.token_ids) != TOKENS for stream in whole),
        "reordered": sum(stream.token_ids != recorded.get(stream.msg_id) for stream in whole),
        "longest_gap_ms": spread([1000 * longest_gap_s(turn) for turn in turns]),
        "late_first_token_ms": spread([1000 * slowest_first_s(turn) for turn in turns]),
    }


def read_reloads(metrics: str) -> dict[str, float]:
    """Sums and counts of the reload times in an explorer's metrics, as "pause_sum" and "pause_count"."""
    lines = [line.split() for line in metrics.splitlines() if line.startswith("flywheel_reload_")]
    found = {name.removeprefix("flywheel_reload_").replace("_seconds", ""): float(value) for name, value in lines}
    return {name: value for name, value in found.items() if name.endswith(("_sum", "_count"))}


def seconds_of_each(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """By metric, the mean over the engines that reloaded in between: each engine's reload counts once."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    names = [name.removesuffix("_sum") for name in grown if name.endswith("_sum")]
    return {name: grown[f"{name}_sum"] / max(1.0, grown[f"{name}_count"]) for name in names}


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Minimum, median and maximum of the finite values; None: there are none."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return {"min": None, "median": None, "max": None}
    return {"min": min(finite), "median": statistics.median(finite), "max": max(finite)}


def as_json(value: Any) -> Any:
    """Figures rounded to four digits; None for those that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {name: as_json(each) for name, each in value.items()}
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else None
