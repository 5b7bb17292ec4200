"""Answers in JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response


def json_answer(content: Any, status: int = 200) -> Response:
    """Return a response with this content, of anything that msgspec encodes."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")
