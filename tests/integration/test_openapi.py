"""docs/openapi.yaml and the explorer say the same: schemathesis sends what it allows, and what not."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import yaml

from explorer_service.app import ROUTES
from explorer_service.status import answer_not_yet
from tests.support.processes import REPOSITORY

DOCUMENT = REPOSITORY / "docs" / "openapi.yaml"
SCHEMATHESIS = REPOSITORY / ".venv-clients" / "bin" / "schemathesis"
EXAMPLES = 400 if os.environ.get("FLYWHEEL_TORTURE") == "full" else 20  # for each operation and phase
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_every_route_is_in_the_document():
    paths = yaml.safe_load(DOCUMENT.read_text(encoding="utf-8"))["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    routes = {(method, path) for method, path, handler in ROUTES if handler is not answer_not_yet}
    assert described == {(method, path.replace(":path}", "}")) for method, path in routes}


def test_the_explorer_answers_as_the_document_says(explorer, tmp_path: Path):
    assert SCHEMATHESIS.exists(), "the clients are not installed: run `make clients`"
    command = [SCHEMATHESIS, "run", DOCUMENT, "--url", explorer.url, "--checks", CHECKS, "--seed", "1", "--no-color"]
    ended = subprocess.run(
        [*command, "--max-examples", str(EXAMPLES), "--generation-database", "none"],
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stdout[-6000:]
    cases = re.search(r"(\d+) generated", ended.stdout)
    assert cases is not None and int(cases[1]) > 10 * EXAMPLES, ended.stdout[-2000:]
