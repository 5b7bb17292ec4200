"""The two forms of slow tests: CI runs the short form; FLYWHEEL_TORTURE=full selects the long one."""

from __future__ import annotations

import os

FULL = os.environ.get("FLYWHEEL_TORTURE") == "full"
