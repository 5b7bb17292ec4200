"""Answers for clients that cannot parse the usual ones."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request


def agentscope_java_answer(request: Request, answer: Any) -> Any:
    """Return the answer to feedback or a commit; only a status for AgentScope Java's training client.

    That client's parser treats an unknown field as a failure, although everything is stored. It is detected by OkHttp's
    User-Agent without an Accept header; other users of OkHttp get the whole answer if they send that header.
    """
    strict = request.headers.get("user-agent", "").startswith("okhttp/") and "accept" not in request.headers
    return {"status": "success"} if strict else answer
