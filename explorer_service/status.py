"""Reading: what lives, what is ready, which versions there are, and how far the trainer is."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from explorer_service.deps import Deps
from explorer_service.errors import unavailable
from shared.errors import LedgerError
from shared.ledger.connect import Ledger
from shared.ledger.queries import VersionRow, count_by_state, list_trainers, list_versions, pace
from shared.ledger.transitions import count_ready

READY_TIMEOUT_S = 5.0


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def answer_health(_request: Request, _deps: Deps) -> Response:
    """GET /health: the process lives."""
    return _json({"status": "ok"})


async def answer_ready(_request: Request, deps: Deps) -> Response:
    """GET /ready: 200 only if a chat would be served and recorded."""
    if not deps.pool.serving:
        raise unavailable(
            "no engine is in service: " + "; ".join(f"{e.name}: {e.state} {e.reason}" for e in deps.pool.engines),
            "engines_away",
        )
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            await deps.recorder.write(lambda connection: None)  # through the writer: its lock, its thread
    except (LedgerError, TimeoutError) as exc:
        raise unavailable(f"the ledger cannot be written: {exc or 'no answer'}", "ledger_away") from exc
    return _json({"status": "ready"})


async def answer_models(request: Request, deps: Deps) -> Response:
    """GET /v1/models: the configured name, and NAME@VERSION for each version in service."""
    deps.auth.require(request, "chat", "feedback")
    name = deps.config.model.name
    names = [name] + [f"{name}@{version}" for version in sorted({e.version or 0 for e in deps.pool.serving})]
    started = int(deps.started_at)
    data = [{"id": model, "object": "model", "created": started, "owned_by": "flywheel"} for model in names]
    return _json({"object": "list", "data": data})


async def answer_metrics(_request: Request, deps: Deps) -> Response:
    """GET /metrics: Prometheus text. While the ledger is away its gauges keep their last values."""
    with contextlib.suppress(LedgerError):
        progress = await asyncio.to_thread(_progress, deps.ledger)
        deps.metrics.claim_ready.set(progress.ready)
        deps.metrics.update_step.set(progress.step)
        deps.metrics.publish_version.set(progress.newest)
        deps.metrics.reload_lag.set(progress.lag)
    return Response(deps.metrics.render(), media_type="text/plain; version=0.0.4")


@dataclass(frozen=True, slots=True)
class _Progress:
    ready: int
    step: int
    newest: int
    lag: int


def _progress(ledger: Ledger) -> _Progress:
    """What is read off indexes alone, however long the table is."""
    with ledger.read() as connection:
        ready, trainers, versions = count_ready(connection), list_trainers(connection), list_versions(connection)
    newest = max((v.version for v in versions if v.state != "REJECTED"), default=0)
    serving = max((v.version for v in versions if v.state == "SERVING"), default=newest)
    return _Progress(ready, max((t.step for t in trainers), default=0), newest, newest - serving)


async def answer_versions(request: Request, deps: Deps) -> Response:
    """GET /versions: every version, oldest first."""
    deps.auth.require(request, "chat", "feedback")
    return _json({"versions": [asdict(row) for row in await _read(deps, _versions)]})


async def answer_status(request: Request, deps: Deps) -> Response:
    """GET /status: rows by state, versions, engines, trainer step and lag."""
    deps.auth.require(request, "chat", "feedback")
    status = await _read(deps, ledger_status)
    status["engines"] = [
        {
            "name": e.name,
            "url": e.url,
            "state": e.state,
            "version": e.version,
            "in_flight": e.in_flight,
            "reason": e.reason,
        }
        for e in deps.pool.engines
    ]
    return _json(status)


async def _read(deps: Deps, query: Any) -> Any:
    try:
        return await asyncio.to_thread(query, deps.ledger)
    except LedgerError as exc:
        raise unavailable(f"the ledger cannot be read: {exc}", "ledger_away") from exc


def _versions(ledger: Ledger) -> list[VersionRow]:
    with ledger.read() as connection:
        return list_versions(connection)


def ledger_status(ledger: Ledger) -> dict[str, Any]:
    """What the ledger knows: rows by state and how they flow, versions, trainers, lag in versions."""
    now = time.time()
    with ledger.read() as connection:
        rows, versions, trainers = count_by_state(connection), list_versions(connection), list_trainers(connection)
        flow = pace(connection, now)
    newest = max((v.version for v in versions if v.state != "REJECTED"), default=None)
    serving = max((v.version for v in versions if v.state == "SERVING"), default=None)
    return {
        "rows": rows,
        "pace": {name: None if value is None else round(value, 1) for name, value in asdict(flow).items()},
        "versions": {
            "newest": newest,
            "serving": serving,
            "published": sum(v.version > 0 for v in versions),
            "reloads": sum(v.version > 0 and v.served_at is not None for v in versions),
        },
        "trainers": [
            {
                "name": t.name,
                "step": t.step,
                "version": t.version,
                "alive": t.alive,
                "heartbeat_age_s": round(now - t.heartbeat_at, 1),
                "stats": t.stats,
            }
            for t in trainers
        ],
        "lag_versions": (newest or 0) - (serving or 0),
    }
