"""Read-only routes: health, readiness, models, versions, metrics and status.

/health, /ready and /metrics need no key, so they are cheap and reveal nothing internal.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response

from explorer_service.api.answer import json_answer
from explorer_service.api.errors import ApiError, unavailable
from explorer_service.api.paging import MAX_ROWS, read_place
from explorer_service.deps import Deps
from explorer_service.engines.engine import EngineState
from explorer_service.errors import VersionNotServed, without_addresses
from shared.config import AUTO
from shared.ledger.queries import ledger_status, list_versions
from shared.versions import LARGEST_VERSION


async def answer_health(_request: Request, _deps: Deps) -> Response:
    """GET /health: the process is alive."""
    return json_answer({"status": "ok"})


async def answer_ready(_request: Request, deps: Deps) -> Response:
    """GET /ready: 200 only if a chat would be served and recorded, by what the explorer knows already.

    degraded: number of engines that serve an older version than they should. An idle explorer knows the ledger's state,
    too, because it writes a heartbeat every two seconds.
    """
    if not deps.pool.is_ready():
        raise unavailable("no engine is in service", "engines_unavailable")
    if not deps.writer.is_available:
        raise unavailable("the ledger cannot be written", "ledger_unavailable")
    degraded = sum(engine.state is EngineState.DEGRADED for engine in deps.pool.engines)
    return json_answer({"status": "ready"} | ({"degraded": degraded} if degraded else {}))


async def answer_models(request: Request, deps: Deps) -> Response:
    """GET /v1/models: the configured name, and NAME@VERSION for each version in service."""
    deps.auth.require(request, "chat", "feedback")
    return json_answer({"object": "list", "data": _models(deps)})


async def answer_model(request: Request, deps: Deps) -> Response:
    """GET /v1/models/NAME: one of these models."""
    deps.auth.require(request, "chat", "feedback")
    name = unquote(request.path_params["model"])
    for model in _models(deps):
        if model["id"] == name:
            return json_answer(model)
    raise VersionNotServed(f"The model `{name}` does not exist.")


def _models(deps: Deps) -> list[dict[str, Any]]:
    name, started = deps.config.model.name, int(deps.started_at)
    names = [name] + [f"{name}@{version}" for version in sorted({v for e in deps.pool.serving for v in e.versions})]
    return [{"id": model, "object": "model", "created": started, "owned_by": "flywheel"} for model in names]


async def answer_metrics(_request: Request, deps: Deps) -> Response:
    """GET /metrics: Prometheus text."""
    return Response(await deps.metrics_text.read(), media_type="text/plain; version=0.0.4")


async def answer_versions(request: Request, deps: Deps) -> Response:
    """GET /versions?before=: versions in parts, the newest part first; engines' addresses only for admins."""
    caller = deps.auth.require(request, "chat", "feedback")
    with caller.reads.taken():
        before = read_place(request, "before", LARGEST_VERSION)
        versions = await deps.reader.read(partial(list_versions, before=before, at_most=MAX_ROWS))
    if not _is_admin(request, deps):
        versions = [replace(row, reason=without_addresses(row.reason)) if row.reason else row for row in versions]
    return json_answer({"versions": versions, "next": versions[0].version if len(versions) == MAX_ROWS else None})


async def answer_status(request: Request, deps: Deps) -> Response:
    """GET /status: rows by state, versions, engines, trainer step and lag; engines' addresses only for admins."""
    caller = deps.auth.require(request, "chat", "feedback")
    with caller.reads.taken():
        status = await deps.reader.read(ledger_status)
    trainer = deps.config.trainer
    named = AUTO if trainer.algorithm == AUTO else " + ".join(trainer.parts)
    status |= {"algorithm": named, "batch_size": trainer.batch_size}
    status["max_staleness_versions"] = trainer.max_staleness_versions
    status["engines"] = [
        {
            "name": e.name,
            "state": e.state,
            "version": e.version,
            "in_flight": e.in_flight,
            "owned": deps.leases.holds(e.url),
        }
        for e in deps.pool.engines
    ]
    if _is_admin(request, deps):
        status["differing_explorers"] = deps.membership.differing
        for shown, engine in zip(status["engines"], deps.pool.engines, strict=True):
            shown |= {"url": engine.url, "reason": engine.reason}
    return json_answer(status)


def _is_admin(request: Request, deps: Deps) -> bool:
    try:
        deps.auth.require(request, "admin")
    except ApiError:
        return False
    return True
