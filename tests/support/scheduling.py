"""Which tests of a run one of several workers runs, and in which order workers begin with them."""

from __future__ import annotations

import functools
import re
from collections import Counter

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.support.processes import REPOSITORY

# What takes the longest goes first: begun last, one worker would run it while the others have nothing left to do.
LONGEST = (
    "e2e tools_live",
    "e2e live",
    "tests/integration/test_trainer.py",
    "tests/integration/test_ranks.py",
    "tests/integration/test_supervisor.py",
    "tests/integration/test_several_explorers.py",
    "tests/e2e/test_6_adapters.py",
    "tests/torture/test_all_three.py",
    "tests/integration/test_publish.py",
    "tests/attacks/test_trainer.py",
    "tests/attacks/test_feedback.py",
    "tests/integration/test_reload_faults.py",
    "tests/integration/test_lora.py",
    "tests/integration/test_state.py",
    "tests/integration/test_openapi.py",
    "tests/examples/test_worlds.py",
    "tests/integration/test_slips.py",
    "tests/integration/test_backup.py",
    "tests/integration/test_rollback_of_a_trainer.py",
    "tests/integration/test_reload.py",
    "tests/integration/test_update.py",
    "tests/integration/test_breaker_bounds.py",
    "tests/sdk/test_frameworks.py",
    "tests/torture/test_ranks_kill.py",
    "tests/torture/test_explorer_kill.py",
    "tests/torture/test_adapters_kill.py",
)


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """One worker runs all tests that share a running service of tests/e2e; of other tests one runs a file."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(super()._split_scope(nodeid))


def sort_by_length(items: list[pytest.Item]) -> None:
    """Sort what takes the longest first, then what has the most tests; `make test` tells xdist to keep this order."""
    scopes = {item: scope_of(item.nodeid.partition("::")[0]) for item in items}
    tests = Counter(scopes.values())
    known = {scope: number for number, scope in enumerate(LONGEST)}
    items.sort(key=lambda item: (known.get(scopes[item], len(known)), -tests[scopes[item]], scopes[item]))


@functools.cache
def scope_of(file: str) -> str:
    """The file, or of tests/e2e the service that it uses: the name of its fixture is in the file's text."""
    if file.startswith("tests/e2e/"):
        text = (REPOSITORY / file).read_text()
        for fixture in ("tools_live", "live"):
            if re.search(rf"\b{fixture}\b", text):
                return f"e2e {fixture}"
    return file
