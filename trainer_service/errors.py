"""The trainer's own failures."""

from __future__ import annotations

from shared.errors import FlywheelError


class UpdateError(FlywheelError):
    """An update gave weights or losses that are not finite; nothing of it may be published."""
