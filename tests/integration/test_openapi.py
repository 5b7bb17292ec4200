"""docs/openapi.yaml and the explorer say the same: schemathesis sends what it allows, and what not."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from jsonschema import Draft202012Validator

from explorer_service.app import ROUTES
from tests.support.forms import FULL, one_database
from tests.support.processes import REPOSITORY

pytestmark = [pytest.mark.usefixtures("patient_health"), one_database]
DOCUMENT = REPOSITORY / "docs" / "openapi.yaml"
SCHEMATHESIS = REPOSITORY / ".venv-clients" / "bin" / "schemathesis"
EXAMPLES = 400 if FULL else 8  # for each operation and phase
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
NAMES = {
    "pattern": "^[A-Za-z0-9_-]{1,80}$"
}  # what of these is sent; the document allows more, of which some is refused
BOUNDS: dict[str, dict[str, Any]] = {
    "task": NAMES,
    "run": NAMES,
    "task_id": NAMES,
    "run_id": NAMES,
    "X-Flywheel-Task": NAMES,
    "X-Flywheel-Run": NAMES,
    "Idempotency-Key": NAMES,
    "model": {"enum": ["agent", "agent@0", "unknown"]},
}
BOUNDS_OF_CHATS: dict[str, dict[str, Any]] = {
    "model": {"enum": ["agent", "agent@0"]},
    "n": {"maximum": 4},
    "temperature": {"maximum": 2},
}


def read_document() -> dict[str, Any]:
    document = yaml.safe_load(DOCUMENT.read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document


def bounded_document() -> dict[str, Any]:
    """The document with bounds that keep what is sent within what the scripted engine serves."""
    document = json.loads(json.dumps(read_document()))  # without YAML's anchors each place is changed by itself
    for methods in document["paths"].values():
        for operation in methods.values():
            for parameter in operation.get("parameters", []):
                parameter["schema"].update(BOUNDS.get(parameter["name"], {}))
    chats = document["components"]["schemas"]["Common"]["properties"]
    for name, bound in BOUNDS_OF_CHATS.items():
        chats[name].update(bound)
    return dict(document)


def places_without_value(node: Any, place: str = "") -> Iterator[str]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        if value is None and isinstance(node, dict):
            yield f"{place}/{key}"
        yield from places_without_value(value, f"{place}/{key}")


def test_every_key_of_the_document_has_a_value():
    assert list(places_without_value(read_document())) == []


def test_the_document_allows_what_the_explorer_serves(explorer):
    name = "shop/ü 1 " + "x" * 300
    reply = explorer.chat(model="agent", n=5, temperature=3, metadata={"task_id": name, "run_id": name})
    assert reply.status_code == 200 and len(reply.json()["choices"]) == 5
    assert len(explorer.http.get("/runs", params={"task_id": name, "run_id": name}).json()["rows"]) == 5
    in_path = f"/run/{quote(name, safe='')}/{quote(name, safe='')}/v1/models"
    assert explorer.http.get(in_path).status_code == 200
    document = read_document()
    chats = document["components"]["schemas"]["Common"]["properties"]
    assert chats["model"].keys().isdisjoint({"enum", "pattern"})
    assert "maximum" not in chats["n"] and "maximum" not in chats["temperature"]
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    schemas = [one["schema"] for operation in operations for one in operation.get("parameters", [])]
    assert schemas and all(schema.keys().isdisjoint({"enum", "pattern"}) for schema in schemas)


HI = [{"role": "user", "content": "hi"}]
UNSET = dict.fromkeys(("model", "store", "stream", "n", "temperature", "metadata"))


@pytest.mark.parametrize(
    ("path", "schema", "body"),
    [
        ("/chat", "Chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}),
        ("/chat", "Chat", {"messages": [{"role": "developer", "content": "be brief"}, *HI]}),
        ("/chat", "Chat", {"messages": HI, "logprobs": None, **UNSET}),
        ("/v1/completions", "Completion", {"prompt": "once", **UNSET}),
    ],
)
def test_the_document_allows_each_form_of_a_chat_that_is_recorded(explorer, path, schema, body):
    reply = explorer.http.post(path, json=body)
    assert reply.status_code == 200 and "X-Flywheel-Recorded" not in reply.headers
    assert refusals(schema, body) == []


@pytest.mark.parametrize("prompt", [["once", "twice"], [1, 2, 3], [[1, 2], [3]]])
def test_the_document_allows_each_form_of_a_prompt_that_an_engine_takes(prompt):
    assert refusals("Completion", {"prompt": prompt}) == []


def refusals(schema: str, body: dict[str, Any]) -> list[str]:
    """What a tool that validates requests by the document says against this one."""
    described = {"$ref": f"#/components/schemas/{schema}", "components": read_document()["components"]}
    return [error.message for error in Draft202012Validator(described).iter_errors(body)]


def test_a_name_longer_than_the_document_allows_is_refused(explorer):
    task_id = read_document()["paths"]["/runs"]["get"]["parameters"][0]
    most = task_id["schema"]["maxLength"]
    for length, status in ((most, 200), (most + 1, 400)):
        assert explorer.http.get("/runs", params={"task_id": "x" * length}).status_code == status


def test_every_route_is_in_the_document():
    paths = read_document()["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    routes = {(method, path) for method, path, _ in ROUTES}
    assert described == {(method, path.replace(":path}", "}")) for method, path in routes}


def test_the_explorer_answers_as_the_document_says(explorer, tmp_path: Path):
    assert SCHEMATHESIS.exists(), "the clients are not installed: run `make clients`"
    document = tmp_path / "openapi.json"
    document.write_text(json.dumps(bounded_document()), encoding="utf-8")
    command = [SCHEMATHESIS, "run", document, "--url", explorer.url, "--checks", CHECKS, "--seed", "1", "--no-color"]
    ended = subprocess.run(
        [*command, "--max-examples", str(EXAMPLES), "--generation-database", "none", "--request-timeout", "60"],
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stdout[-6000:]
    cases = re.search(r"(\d+) generated", ended.stdout)
    assert cases is not None and int(cases[1]) > 10 * EXAMPLES, ended.stdout[-2000:]
