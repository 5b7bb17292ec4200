"""Whether a chat that has no engine may wait for one, or none can answer it soon."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from explorer_service.engines.engine import Engine, EngineState
from explorer_service.errors import NoEngine, VersionNotServed, without_addresses


def require_soon(
    engines: Sequence[Engine], pinned: Collection[int], version: int | None, avoid: Collection[str]
) -> None:
    """Raise NoEngine or VersionNotServed if no engine can serve a request soon.

    pinned: versions that engines have to load. version: the one that must answer; None: any. avoid: names of engines
    that lost the request.
    """
    known, what = engines, "no engine"
    serving = [engine for engine in engines if engine.is_open]
    if version is not None and serving:
        is_pinned = version in pinned  # then an engine that is away may load it later
        able = [e for e in (engines if is_pinned else serving) if _may_serve(e, version, pinned)]
        if is_pinned:
            known, what = able, f"no engine for version {version}"
        if not able:
            served = sorted({v for e in serving for v in e.versions})
            reasons = (e.refused[version] for e in engines if version in e.refused)
            why = next((f" ({without_addresses(reason)})" for reason in reasons), "")
            raise VersionNotServed(f"version {version} is not in service{why}; in service: {served}")
    if all(e.state is EngineState.UNAVAILABLE or e.name in avoid for e in known):
        raise NoEngine(f"{what} answers; try again", "engines_unavailable")


def none_free(wait_s: float, *, is_known: bool) -> NoEngine:
    """Return the error of a chat that waited as long as it may. is_known: whether it is known what engines serve."""
    if is_known:
        return NoEngine(f"no engine was free for this chat within {wait_s:g} s; try again", "engines_busy")
    message = "the explorer does not know what engines serve now: is the database up? Try again"
    return NoEngine(message, "engines_unavailable")


def _may_serve(engine: Engine, version: int, pinned: Collection[int]) -> bool:
    """Whether an engine serves a version, or may load it because it is pinned."""
    return version in engine.versions or (version in pinned and version not in engine.refused)
