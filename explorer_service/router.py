"""Which version answers a request: the caller's pin, or the version in service; then the least loaded engine of it."""

from __future__ import annotations

from collections.abc import Collection

from explorer_service.engines.pool import Engine, EnginePool, Seat
from explorer_service.errors import ApiError, bad_request


class Router:
    """Reads `model` as callers write it: NAME or NAME@VERSION."""

    def __init__(self, model_name: str, pool: EnginePool) -> None:
        self._name = model_name
        self._pool = pool

    def parse(self, model: object) -> int | None:
        """The pinned version, or None. Raises ApiError 400 or 404."""
        if model is None or model == self._name:
            return None
        if not isinstance(model, str):
            raise bad_request(f"model must be a string such as {self._name!r}", param="model")
        name, mark, pin = model.rpartition("@")
        if mark and name == self._name and pin.isascii() and pin.isdigit() and len(pin) < 10:
            return int(pin)
        raise ApiError(
            404,
            f"The model `{model}` does not exist. Valid aliases: {self._name}.",  # word for word as vLLM says it
            kind="NotFoundError",
            param="model",
            code=404,
        )

    async def take(self, pin: int | None, *, seeded: bool, affinity: int = 0, avoid: Collection[Engine] = ()) -> Seat:
        """A place at an engine that serves the version. Raises as EnginePool.take does."""
        return await self._pool.take(pin, seeded=seeded, affinity=affinity, avoid=avoid)
