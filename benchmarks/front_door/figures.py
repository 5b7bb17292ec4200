"""Makes the report from the figures of all turns: medians, ratios, and whether each target holds."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.front_door.load import Figures

Turns = dict[str, dict[str, list[Figures]]]  # gateway -> load -> the figures of each turn
ADDED = ("p50_ms", "p99_ms", "first_event_p50_ms", "gap_p50_ms")
PEERS = ("trinity", "litellm")
# The ratio of differences near 0, of counts, or of a given duration has no meaning.
NO_RATIO = ("added_gap_p50_ms", "events_min", "events_max", "failed", "chats", "seconds")
PICK: dict[str, Callable[[list[float]], float]] = {
    "events_min": min,
    "events_max": max,
    "failed": sum,
}  # over all turns; for every other figure the median


def add_latencies(measured: dict[str, Figures]) -> None:
    """Add what each gateway adds to the engine's own latency, for one load in one turn."""
    direct = measured["direct"]
    for name, figures in measured.items():
        if name != "direct":
            figures |= {f"added_{figure}": figures[figure] - direct[figure] for figure in ADDED if figure in figures}


def summarize(turns: Turns) -> dict[str, Any]:
    """For each gateway, the medians over its turns; for each compared pair, both kinds of ratios."""
    report: dict[str, Any] = {
        name: {load: _medians(figures) for load, figures in loads.items()} for name, loads in turns.items()
    }
    pairs = [("flywheel", name) for name in ("before", *PEERS)] + [("before", name) for name in PEERS]
    for one, other in pairs:
        if one in turns and other in turns:
            report[f"{one} / {other}"] = {
                load: _ratios(figures, turns[other][load]) for load, figures in turns[one].items()
            }
    return report


def _medians(turns: list[Figures]) -> Figures:
    return {figure: PICK.get(figure, statistics.median)([turn[figure] for turn in turns]) for figure in turns[0]}


def _ratios(turns: list[Figures], others: list[Figures]) -> dict[str, dict[str, float | None]]:
    """of_medians: ratio of the two medians. by_turn: median of the ratios within each turn."""
    medians, other_medians = _medians(turns), _medians(others)
    ratios: dict[str, dict[str, float | None]] = {}
    for figure in turns[0]:
        if figure in others[0] and figure not in NO_RATIO:
            by_turn = [_ratio(a[figure], b[figure]) for a, b in zip(turns, others, strict=True)]
            known = [ratio for ratio in by_turn if ratio is not None]
            ratios[figure] = {
                "of_medians": _ratio(medians[figure], other_medians[figure]),
                "by_turn": statistics.median(known) if known else None,
            }
    return ratios


def _ratio(value: float, other: float) -> float | None:
    return value / other if other > 0 else None


def targets(report: dict[str, Any], n_reply: int, small: str, large: str) -> list[dict[str, Any]]:
    """Each target: our figure, the older commit's, the bound, and whether ours holds; None: not measured.

    small, large: the names of the two sizes. Shares are medians of the ratios within each turn.
    """
    rows = []
    for size in (small, large):
        rows += [
            _share(report, size, "chats_32", "cpu_ms_per_chat", 0.08),
            _share(report, size, "chats_1", "cpu_ms_per_chat", 0.2),
        ]
    rows.append(_share(report, small, "streams_16", "cpu_ms_per_event", 0.4))
    rate = _both(lambda name: _find(report, small, name, "chats_32", "chats_per_s"))
    rows.append(_row("recorded chats a second on one core", rate, at_least=3000))
    first = _both(lambda name: _worst_first_event(report, small, name))
    rows.append(_row("first event added, ms, the most of all stream loads", first, at_most=2.0))
    growth = _both(lambda name: _find(report, "soak", name, "chats_32", "resident_end_over_first_part"))
    rows.append(_row("resident memory at the end of the soak, over that after its first tenth", growth, at_most=1.02))
    wrong = _both(lambda name: _wrong_events(report, small, name, n_reply + 2))
    rows.append(_row("events lost or added in a stream, the most of all streams", wrong, at_most=0))
    failed = _both(lambda name: _failed(report, name))
    rows.append(_row("chats and streams that failed, and dropped turns", failed, at_most=0))
    return rows


def _share(report: dict[str, Any], size: str, load: str, figure: str, bound: float) -> dict[str, Any]:
    values = _both(lambda name: _find(report, size, f"{name} / trinity", load, figure, "by_turn"))
    return _row(f"{size} tokens, {load}: {figure} over Trinity-RFT's", values, at_most=bound)


def _both(figure: Callable[[str], float | None]) -> dict[str, float | None]:
    """Our figure, and that of the older commit."""
    return {name: figure(name) for name in ("flywheel", "before")}


def _row(
    what: str, values: dict[str, float | None], at_most: float | None = None, at_least: float | None = None
) -> dict[str, Any]:
    ours = values["flywheel"]
    row: dict[str, Any] = {"what": what, "figure": ours, "before": values["before"]}
    if at_most is not None:
        return row | {"at_most": at_most, "holds": None if ours is None else ours <= at_most}
    assert at_least is not None
    return row | {"at_least": at_least, "holds": None if ours is None else ours >= at_least}


def _find(report: dict[str, Any], *keys: str) -> Any:
    value: Any = report
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _of_streams(report: dict[str, Any], size: str, name: str) -> list[Figures]:
    loads = report.get(size, {}).get(name, {})
    return [figures for load, figures in loads.items() if load.startswith("streams_")]


def _worst_first_event(report: dict[str, Any], size: str, name: str) -> float | None:
    return max((figures["added_first_event_p50_ms"] for figures in _of_streams(report, size, name)), default=None)


def _wrong_events(report: dict[str, Any], size: str, name: str, expected: int) -> float | None:
    counts = [figures[key] for figures in _of_streams(report, size, name) for key in ("events_min", "events_max")]
    return max((abs(count - expected) for count in counts), default=None)


def _failed(report: dict[str, Any], name: str) -> float | None:
    """Failed chats and streams, and turns that were dropped because all of them failed."""
    loads = [figures for part in report.values() for figures in part.get(name, {}).values()]
    dropped = [turn for part in report.values() for turn in part.get("turns_dropped", ()) if turn["gateway"] == name]
    return sum(figures.get("failed", 0) for figures in loads) + len(dropped) if loads or dropped else None


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
