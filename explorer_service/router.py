"""Which version answers a request: the caller's pin, or the version in service. (The pool finds an engine of it.)"""

from __future__ import annotations

from explorer_service.errors import ApiError, bad_request


class Router:
    """Reads `model` as callers write it: NAME or NAME@VERSION."""

    def __init__(self, model_name: str) -> None:
        self._name = model_name

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
