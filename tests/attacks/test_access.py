"""Who may do what: pages of other sites, foreign names, an engine's administration, keys and groups."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import httpx
import pytest

from shared.ledger import transitions
from tests.integration.test_reload import version_states
from tests.support.postgres import sqlite_alone
from tests.support.processes import REPOSITORY, write_config
from tests.support.servers import free_port, make_config, publish, served, wait_until, write_scripted_version

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
SIGNAL = {"task_id": "t", "reward": 1.0}


database_url = sqlite_alone  # nothing here depends on the database


def ask(explorer, method: str, path: str, body: object = None, **headers: str) -> httpx.Response:
    """A request with exactly these headers, underscores read as hyphens."""
    content = None if body is None else json.dumps(body)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    with httpx.Client(base_url=explorer.url, timeout=60) as client:
        return client.request(method, path, content=content, headers=named)


JSON = {"Content_Type": "application/json"}


@pytest.mark.parametrize(("path", "body"), [("/chat", CHAT), ("/feedback", SIGNAL), ("/commit", None)])
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
    ids=str,
)
def test_a_page_of_another_site_is_refused(explorer, scripted_engine, path, body, headers):
    answer = ask(explorer, "POST", path, body, **JSON, **headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_site")
    assert not scripted_engine.script.bodies


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8010", "127.0.0.1.evil.example", "localhost.evil", "[", ""]
)
def test_a_name_that_an_attacker_made_resolve_to_loopback_is_refused(explorer, host):
    for method, path, body in (("GET", "/status", None), ("POST", "/chat", CHAT)):
        answer = ask(explorer, method, path, body, **JSON, Host=host)
        assert answer.status_code == 403 or (host == "" and answer.status_code == 400)


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_a_body_that_needs_no_consent_across_sites_is_refused_in_one_sentence(explorer, content_type):
    answer = ask(explorer, "POST", "/chat", CHAT, **({"Content_Type": content_type} if content_type else {}))
    assert answer.status_code == 415
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8010", "127.0.0.1:1", "127.8.9.1", "[::1]:8010", "app.localhost", "x"]
)
def test_our_own_names_and_pages_pass(explorer, host):
    assert (
        ask(explorer, "POST", "/chat", CHAT, Content_Type="application/json; charset=utf-8", Host=host).status_code
        == 200
    )
    own = {"Origin": f"http://{host}", "Sec_Fetch_Site": "same-origin"}
    assert ask(explorer, "POST", "/chat", CHAT, **JSON, Host=host, **own).status_code == 200
    assert ask(explorer, "POST", "/commit", Host=host).status_code == 200


def test_an_ipv6_address_that_is_allowed_passes(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], allowed_hosts=["fd00::1"]).wait_ready()
    statuses = [ask(explorer, "GET", "/status", Host=host).status_code for host in ("[fd00::1]:8010", "[fd00::2]:8010")]
    assert statuses == [200, 403]


def damage_probe(explorer, version: int, damage) -> None:
    """Publish a version whose manifest is damaged after it was written."""
    folder = write_scripted_version(explorer.config.root, version, -1.0)
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    damage(manifest)
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))
    with explorer.ledger.write() as connection:
        transitions.publish(connection, version=version, parent=version - 1, kind="full", step=version)


def shorten(manifest: dict) -> None:
    manifest["probe"]["sequences"][0]["logprobs"].pop()


def empty(manifest: dict) -> None:
    manifest["probe"]["sequences"] = []


def one_token(manifest: dict) -> None:
    manifest["probe"]["sequences"] = [{"token_ids": [1], "logprobs": []}]


def no_token(manifest: dict) -> None:
    manifest["probe"]["sequences"][0]["token_ids"][0] = 2**40


def elsewhere(manifest: dict) -> None:
    manifest["files"]["../../../etc/hostname"] = {"size": 1, "sha256": "0" * 64}


def not_a_name(manifest: dict) -> None:
    manifest["files"]["a\0b"] = {"size": 1, "sha256": "0" * 64}


@pytest.mark.parametrize("damage", [shorten, empty, one_token, no_token, elsewhere, not_a_name])
def test_a_version_whose_manifest_contradicts_itself_is_rejected_and_the_explorer_serves_on(explorer, damage):
    publish(explorer, 1)
    wait_until(lambda: served(explorer) == "1")
    damage_probe(explorer, 2, damage)
    wait_until(lambda: version_states(explorer)[2] == "REJECTED")
    assert served(explorer) == "1"
    publish(explorer, 3, -3.0)
    wait_until(lambda: served(explorer) == "3")


def test_a_version_whose_generation_settings_are_damaged_is_rejected(explorer):
    publish(explorer, 1)
    wait_until(lambda: served(explorer) == "1")
    write_scripted_version(explorer.config.root, 2, -1.0, {"generation_config.json": b'{"temperature": "\xff'})
    with explorer.ledger.write() as connection:
        transitions.publish(connection, version=2, parent=1, kind="full", step=2)
    wait_until(lambda: version_states(explorer)[2] == "REJECTED")
    assert served(explorer) == "1"


def test_an_engine_that_somebody_paused_is_resumed_by_its_owner(explorer, scripted_engine, monkeypatch):
    monkeypatch.setattr("explorer_service.reload.health.STALLED_AFTER_S", 1.0)
    scripted_engine.script.paused = True
    assert explorer.chat().status_code == 200


DYING_EXPLORER = """
import sys
from explorer_service.membership import Membership
from services.cli import main

async def die(self):
    raise RuntimeError("no more")

Membership.run = die
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("more", [[], ["--worker"]], ids=str)
def test_an_explorer_whose_side_task_dies_ends_with_status_1(tmp_path, more):
    """So that systemd's Restart=on-failure starts it again."""
    file = write_config(make_config(tmp_path, ["http://127.0.0.1:9"], port=free_port()), tmp_path / "flywheel.yaml")
    command = [sys.executable, "-c", DYING_EXPLORER, "explorer", "-c", str(file), *more]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 1, ended.stderr[-1500:]
    assert "flywheel: membership died" in ended.stderr


@pytest.mark.parametrize("key", [{}, {"Authorization": "Bearer placeholder"}], ids=["none", "unknown"])
def test_an_open_network_gives_feedback_and_commits_and_reads_nothing_without_a_key(
    scripted_engine, start_explorer, key
):
    keys = [{"sha256": hashlib.sha256(b"chat").hexdigest(), "role": "chat"}]
    explorer = start_explorer([scripted_engine.url], keys=keys, open_feedback_from=["127.0.0.0/8"]).wait_ready()
    said = {"msg_ids": ["unknown"], "reward": 1}
    assert explorer.http.post("/feedback", json=said, headers=key).status_code == 404
    assert explorer.http.post("/commit", headers=key).status_code == 200
    for path in ("/runs?task_id=t", "/status", "/versions", "/v1/models"):
        assert explorer.http.get(path, headers=key).status_code == 401
    assert explorer.http.post("/chat", json={"messages": []}, headers=key).status_code == 401


def test_no_browser_rates_without_a_key_from_an_open_network(scripted_engine, start_explorer):
    """It may be there on a stranger's errand."""
    keys = [{"sha256": hashlib.sha256(b"chat").hexdigest(), "role": "chat"}]
    explorer = start_explorer([scripted_engine.url], keys=keys, open_feedback_from=["127.0.0.0/8"]).wait_ready()
    assert ask(explorer, "POST", "/commit").status_code == 200
    for page in ({"Origin": "https://evil.example"}, {"Sec_Fetch_Site": "cross-site"}, {"Origin": explorer.url}):
        assert ask(explorer, "POST", "/commit", **page).status_code == 401
        assert ask(explorer, "POST", "/commit", **page, Authorization="Bearer placeholder").status_code == 401
