"""A scripted engine's answers about itself: its health, and its own name."""

from __future__ import annotations

from aiohttp import web

from tests.support.script import Script


def add_identity(app: web.Application, script: Script) -> None:
    """Add the routes."""

    async def health(_request: web.Request) -> web.Response:
        return web.Response(status=200 if script.healthy else 503)

    async def identity(_request: web.Request) -> web.Response:
        if script.identity is None:
            return web.Response(status=404)
        return web.json_response({"identity": script.identity})

    app.router.add_get("/health", health)
    app.router.add_get("/flywheel/identity", identity)
