"""Long lists are answered in parts. The caller gets the next part with the `next` of the answer before it."""

from __future__ import annotations

from starlette.requests import Request

from explorer_service.api.errors import bad_request

MAX_ROWS = 1000  # in one answer


def read_place(request: Request, name: str, largest: int = 2**63 - 1) -> int | None:
    """Return the query's parameter at which a part begins; None if there is none. Raises ApiError 400.

    largest: that the ledger's column holds.
    """
    value = request.query_params.get(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < 20 and int(value) <= largest):
        raise bad_request(f"{name} must be the `next` of the previous answer", name)
    return int(value)
