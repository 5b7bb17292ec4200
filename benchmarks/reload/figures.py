"""The figures of turns: failed replies, and the spread of gaps and first tokens."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from sqlalchemy import select

from benchmarks.reload.service import Service
from benchmarks.reload.turn import TOKENS, Turn
from shared.experience import Tokens
from shared.ledger.tables import experiences, payloads


def row_to_first_chat(turn: Turn) -> float:
    """Seconds from the version's row until a caller received the first token of a chat that only it answered."""
    return min(chat.first_token_at for chat in turn.late if chat.version == turn.published) - turn.row_at


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


def summarize(turns: list[Turn], recorded: dict[str, list[int]]) -> dict[str, Any]:
    streams = [stream for turn in turns for stream in turn.streams]
    whole = [stream for stream in streams if not stream.failed]
    return {
        "turns": len(turns),
        "replies": len(streams),
        "failed": len(streams) - len(whole),
        "truncated": sum(len(stream.token_ids) != TOKENS for stream in whole),
        "reordered": sum(stream.token_ids != recorded.get(stream.msg_id) for stream in whole),
        "longest_gap_ms": spread([1000 * max(stream.longest_gap_s for stream in turn.streams) for turn in turns]),
        "late_first_token_ms": spread([1000 * max(chat.first_token_s for chat in turn.late) for turn in turns]),
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


def spread(values: Sequence[float]) -> dict[str, float]:
    """Minimum, median and maximum."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}
