"""Clients as people write them, unchanged, against the explorer and the real engine; and the README's own lines."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from typing import Any

import openai
import pytest
from sqlalchemy import select

from shared.ledger.connect import Ledger
from shared.ledger.tables import experiences
from tests.e2e.conftest import Live
from tests.support.processes import REPOSITORY

pytestmark = pytest.mark.engine
MESSAGES: Any = [{"role": "user", "content": "hello w1 w2"}]


@pytest.fixture
def base_url(live: Live) -> str:
    return str(live.http.base_url).rstrip("/") + "/v1"


@pytest.fixture
def client(base_url):
    with openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0) as opened:
        yield opened


def rows(live: Live, msg_id: str) -> list[Any]:
    ledger = Ledger.open(live.config.ledger_url)
    with ledger.read() as connection:
        query = select(experiences).where(experiences.c.msg_id == msg_id).order_by(experiences.c.choice)
        found = list(connection.execute(query))
    ledger.close()
    return found


def test_openai_sync_with_n_and_logprobs(live, client):
    reply = client.chat.completions.create(
        model="agent", messages=MESSAGES, n=3, max_tokens=6, logprobs=True, top_logprobs=2, temperature=1.0
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert all(len(entry.top_logprobs) == 2 for entry in reply.choices[0].logprobs.content)
    recorded = rows(live, reply.id)
    assert [row.n_reply for row in recorded] == [len(choice.logprobs.content) for choice in reply.choices]
    assert sum(row.n_reply for row in recorded) == reply.usage.completion_tokens


def test_openai_streams_with_usage(live, client):
    stream = client.chat.completions.create(
        model="agent", messages=MESSAGES, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    (row,) = rows(live, chunks[0].id)
    assert {chunk.id for chunk in chunks} == {row.msg_id}
    assert chunks[-1].usage.completion_tokens == row.n_reply
    assert chunks[-1].usage.prompt_tokens == row.n_prompt


def test_openai_async_side_by_side(live, base_url):
    async def all_of_them() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="unused") as client:
            create = client.chat.completions.create
            return await asyncio.gather(*(create(model="agent", messages=MESSAGES, max_tokens=4) for _ in range(8)))

    replies = asyncio.run(all_of_them())
    assert len({reply.id for reply in replies}) == 8
    assert all(len(rows(live, reply.id)) == 1 for reply in replies)


def test_openai_sees_the_engines_refusals_as_its_own(client):
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="agent", messages=MESSAGES, temperature=-1)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    assert next(iter(client.models.list())).id == "agent"


def test_the_turns_of_an_unchanged_agent_are_one_conversation(live, client):
    messages = list(MESSAGES)
    ids = []
    for turn in range(3):
        reply = client.chat.completions.create(model="agent", messages=messages, max_tokens=5)
        ids.append(reply.id)
        messages += [reply.choices[0].message, {"role": "user", "content": f"w{turn}"}]
    found = [rows(live, name)[0] for name in ids]
    assert [row.parent_id for row in found] == [None, ids[0], ids[1]]
    assert len({row.conversation_id for row in found}) == 1


def readme(language: str, page: str = "README.md") -> str:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)[0]


def test_the_readmes_python_runs(live, base_url):
    code = readme("python").replace("http://127.0.0.1:8010", base_url.removesuffix("/v1"))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_readmes_curl_runs(live, base_url):
    code = readme("bash").replace("http://127.0.0.1:8010", base_url.removesuffix("/v1"))
    ended = subprocess.run(["bash", "-ec", code], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert '"state":"applied"' in ended.stdout
    assert '"committed":' in ended.stdout


def test_the_lines_for_compose_run(live, base_url, tmp_path):
    """Keys are asked for where some are set; none are here."""
    (tmp_path / ".env").write_text("ADMIN_KEY=a\nCHAT_KEY=b\nFEEDBACK_KEY=c\n")
    code = readme("bash", "docs/compose.md").replace("http://127.0.0.1:8010", base_url.removesuffix("/v1"))
    code = code.replace("curl -s", "curl -sS --fail-with-body").replace("chatcmpl-…", live.chat()["id"])
    ended = subprocess.run(
        ["bash", "-ec", code], capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert '"state":"applied"' in ended.stdout and '"committed":' in ended.stdout
