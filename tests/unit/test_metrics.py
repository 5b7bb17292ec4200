"""docs/metrics.md and the code name the same metrics."""

from __future__ import annotations

import re
from pathlib import Path

from shared.metrics import ExplorerMetrics


def test_every_metric_stands_in_the_docs_and_every_documented_metric_exists():
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    documented = {name.removesuffix("_total") for name in re.findall(r"^\| `(flywheel_\w+)`", text, re.MULTILINE)}
    assert documented == {family.name for family in ExplorerMetrics().registry.collect()}
