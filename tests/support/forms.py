"""The two forms of slow tests: CI runs the short form, and a person who wants all of it the long one."""

from __future__ import annotations

import os

FULL = os.environ.get("FLYWHEEL_TORTURE") == "full"
