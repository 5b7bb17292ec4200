"""Choose the version that answers a request: the one that the caller pinned, or else the one in service.

`Router.choose` is called once per request. The pool knows the versions in service, and chooses the engine. If several
versions share the chats, `shares.py` chooses one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Route:
    """A request's version, and what its engine is chosen by."""

    asked: str  # the model's name in the request, or the configured one
    version: int | None = None  # None: the version in service
    affinity: int = 0  # requests with the same number prefer the same engine
    unknown_model: object = None  # the request's `model` if it is unknown: the engine refuses it

    @property
    def names_none(self) -> bool:
        """Whether the request leaves its version to the explorer."""
        return self.version is None and self.unknown_model is None


class Router:
    """Chooses a version for each request."""

    def __init__(self, model_name: str, *, engines: int) -> None:
        self.model_name = model_name
        self.uses_affinity = engines > 1

    def choose(self, model: object, affinity: int = 0) -> Route:
        """Return the route of a request for this `model`."""
        if model in (None, "", self.model_name):  # vLLM treats an empty name as missing
            return Route(self.model_name, None, affinity)
        version, asked = parse_model_name(model, self.model_name), str(model)
        return Route(asked, version, affinity, unknown_model=model if version is None else None)


def parse_model_name(model: object, name: str) -> int | None:
    """Return the version pinned by NAME@VERSION; None for anything else."""
    given, _, pin = model.rpartition("@") if isinstance(model, str) else ("", "", "")
    return int(pin) if given == name and pin.isascii() and pin.isdigit() and len(pin) < 10 else None
