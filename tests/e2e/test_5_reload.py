"""Take-ups of the real engine: what it holds is read, what is in flight stays whole, and bad weights reach nobody."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from sqlalchemy import select

from shared.engine_token import engine_token
from shared.experience import Sampling, Tokens
from shared.ledger.queries import list_versions
from shared.ledger.tables import experiences, payloads
from shared.versions import version_label, version_path
from tests.e2e.conftest import Live
from tests.e2e.test_1_loop import LOGPROB_TOLERANCE, recompute
from tests.support.folder_faults import WRONG_PROBE, publish_copy
from tests.support.processes import wait_for

pytestmark = pytest.mark.engine
STREAMS = 6


def label(live: Live) -> str:
    """What the engine says of its weights."""
    headers = {"X-Flywheel-Engine-Token": engine_token(live.config)}
    reply = httpx.get(live.engine_url + "/weight_info", headers=headers, timeout=30)
    return str(reply.raise_for_status().json()["weight_version"])


def serving(live: Live) -> int:
    return int(live.status()["versions"]["serving"])


class Streams:
    """Long chats in flight, each with the id of its message, and how it ended."""

    def __init__(self, live: Live) -> None:
        self.ids: list[str] = []
        self.ends: dict[str, str] = {}
        self._live = live
        self._threads = [threading.Thread(target=self._stream, args=(n,)) for n in range(STREAMS)]

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        wait_for(lambda: len(self.ids) == STREAMS, "streams", 240)
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(120)

    def _stream(self, number: int) -> None:
        body = {"messages": [{"role": "user", "content": f"w{number}"}], "max_tokens": 220, "stream": True}
        url = str(self._live.http.base_url) + "/v1/chat/completions"
        with httpx.stream("POST", url, json={**body, "ignore_eos": True}, timeout=120) as reply:
            msg_id, end = "", ""
            for line in filter(None, reply.iter_lines()):
                end = line
                if not msg_id:
                    msg_id = json.loads(line[6:])["id"]
                    self.ids.append(msg_id)
            self.ends[msg_id] = end


def test_the_engine_says_which_version_it_holds_and_only_to_those_who_may_ask(live):
    version = live.learn(8)
    assert label(live) == version_label(version, live.config.root / version_path(version))
    assert httpx.get(live.engine_url + "/weight_info", timeout=30).status_code == 403


def test_weights_that_fail_their_proof_reach_no_caller_and_no_row(live, ledger):
    before = serving(live)

    with Streams(live) as chats:
        version = publish_copy(live.config.root, ledger, before, WRONG_PROBE)
    wait_for(lambda: _row(ledger, version).state == "REJECTED", "the verdict", 120)
    wait_for(lambda: live.http.get("/ready").status_code == 200, "service", 120)
    assert serving(live) == before
    assert label(live).startswith(f"{before}:")
    with ledger.read() as connection:
        rows = connection.execute(select(experiences).where(experiences.c.msg_id.in_(chats.ids))).all()
    assert {(row.version, row.version_end) for row in rows} <= {(before, before)}
    whole = {msg_id for msg_id, end in chats.ends.items() if end == "data: [DONE]"}
    assert {row.msg_id for row in rows} == whole
    assert all("weights_unproven" in end for msg_id, end in chats.ends.items() if msg_id not in whole)


def test_streams_that_cross_a_reload_are_whole_and_each_token_is_one_of_its_two_versions(live, ledger):
    before = serving(live)
    with Streams(live) as chats:
        version = live.learn(8)
    assert set(chats.ends.values()) == {"data: [DONE]"}
    check_tokens(live.config.root, ledger, chats.ids)
    assert before < version


def check_tokens(root: Path, ledger: Any, ids: Collection[str]) -> None:
    """Each of these messages has its row, and its tokens are of the versions that the row names."""
    with ledger.read() as connection:
        query = select(experiences, payloads.c.tokens).join(payloads).where(experiences.c.msg_id.in_(ids))
        rows = connection.execute(query).all()
    assert len(rows) == len(ids)
    for row in rows:
        tokens = Tokens.decode(row.tokens)
        sampling = Sampling(**{field.name: row._mapping[field.name] for field in fields(Sampling)})
        first, last = (
            np.abs(recompute(root / version_path(v), tokens, sampling) - tokens.logprobs) < LOGPROB_TOLERANCE
            for v in (row.version, row.version_end)
        )
        assert first[0] and last[-1], (row.version, row.version_end)
        if row.version_end - row.version <= 1:
            switch = int(np.argmin(first)) if not first.all() else len(first)
            assert last[switch:].all()


def _row(ledger: Any, version: int) -> Any:
    with ledger.read() as connection:
        return next(row for row in list_versions(connection) if row.version == version)
