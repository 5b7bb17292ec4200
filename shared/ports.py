"""Checks and finds ports to listen on."""

from __future__ import annotations

import errno
import socket

from shared.errors import StartupError


def require_free_port(host: str, port: int, setting: str) -> None:
    """Raise StartupError if one cannot listen there; the message names the setting to change."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            remedy = "end what holds the port, or change" if exc.errno == errno.EADDRINUSE else "correct"
            raise StartupError(f"cannot listen on {host}:{port} ({exc.strerror}); {remedy} {setting}") from exc


def free_port() -> int:
    """Return a port of the loopback interface that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
