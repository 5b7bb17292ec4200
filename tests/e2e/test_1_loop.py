"""The whole loop on the real engine: what is sampled is recorded as sampled, and what is reloaded is what was trained.

The files of this folder are numbered: many share one running engine, and the last of them kills things.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from sqlalchemy import select
from transformers import RepetitionPenaltyLogitsProcessor

from shared.config import Config
from shared.experience import Sampling, Tokens
from shared.ledger.connect import Ledger
from shared.ledger.tables import experiences, payloads
from tests.e2e.conftest import DEFAULT_REPETITION_PENALTY, ENGINE_START_S, Live
from tests.support.batches import assemble
from tests.support.forms import FULL
from tests.support.processes import Process, wait_for, write_config
from tests.support.servers import free_port
from trainer_service.models import load_causal_lm, load_prepared, score_actions
from trainer_service.packing import pack

pytestmark = pytest.mark.engine
LOGPROB_TOLERANCE = 1e-4  # the largest difference seen is about 1e-6


def rows_of(live: Live, ids: list[str]) -> list[Any]:
    ledger = Ledger.open(live.config.ledger_url)
    with ledger.read() as connection:
        query = select(experiences, payloads.c.tokens).join(payloads).where(experiences.c.msg_id.in_(ids))
        rows = list(connection.execute(query))
    ledger.close()
    return rows


def recompute(folder: Path, tokens: Tokens, sampling: Sampling) -> np.ndarray:
    """The trainer's own logprobs of recorded tokens."""
    from shared.experience import Experience

    row = Experience(1, "m", 0, None, None, None, "m", 0, 0.0, 0.0, tokens, sampling)
    batch = assemble([row])
    (micro,) = pack(batch, [0], 4096)
    with torch.no_grad():
        return score_actions(load_prepared(folder), micro, processed=True)["processed"].numpy()


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.25}


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.7},
        {"temperature": 1.0},
        {"temperature": 1.3},
        {"temperature": 0.0},
        {"temperature": 0.7, **PENALTIES},
        {"temperature": 1.3, "top_k": 20, **PENALTIES, "presence_penalty": -1.0},
        {"temperature": 0.0, "frequency_penalty": 1.5},
    ],
)
def test_recorded_logprobs_agree_with_the_trainers_recomputation(live, asked, record_property):
    """Also with the repetition penalty of the model's generation_config.json, where the request names none."""
    asked = {"top_p": 0.9, **asked}
    ids = [live.chat(**asked, max_tokens=24)["id"] for _ in range(8)]
    largest = 0.0
    for row in rows_of(live, ids):
        tokens = Tokens.decode(row.tokens)
        sampling = Sampling(**{field.name: row._mapping[field.name] for field in fields(Sampling)})
        assert sampling == Sampling(**{"repetition_penalty": DEFAULT_REPETITION_PENALTY, **asked})
        folder = live.config.root / f"versions/v{row.version:06d}"
        largest = max(largest, float(np.abs(recompute(folder, tokens, sampling) - tokens.logprobs).max()))
    record_property("largest_difference", largest)
    print(f"{asked}: largest difference {largest:.2e}")
    assert largest < LOGPROB_TOLERANCE


def test_a_streamed_chat_is_recorded_like_a_plain_one(live):
    body = {"messages": [{"role": "user", "content": "w3 w4"}], "max_tokens": 10, "temperature": 0, "stream": True}
    with live.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    plain = live.chat(messages=body["messages"], max_tokens=10, temperature=0)
    streamed = "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])
    assert streamed == plain["choices"][0]["message"]["content"]
    assert "token_ids" not in events[1]["choices"][0] or events[1]["choices"][0]["token_ids"] is None
    first, second = rows_of(live, [events[0]["id"]]), rows_of(live, [plain["id"]])
    a, b = Tokens.decode(first[0].tokens), Tokens.decode(second[0].tokens)
    assert (a.prompt_ids == b.prompt_ids).all() and (a.reply_ids == b.reply_ids).all()
    assert np.abs(a.logprobs - b.logprobs).max() < LOGPROB_TOLERANCE


def test_feedback_and_commit_become_a_new_version_in_service(live):
    version = live.learn(8)
    answer = live.chat()
    assert answer["version"] >= version >= 1
    trainer = live.status()["trainers"][0]
    assert trainer["stats"]["logprob_gap_max"] < LOGPROB_TOLERANCE
    assert live.chat(model=f"agent@{version}")["version"] == version


PROMPTS = ["hello w1 w2", "w5 w6 w7 w8 w9 w10 w11 w12 w13 w14 w15 w16 " * 6, "w100 w101"]


@dataclass
class Greedy:
    """A reply of temperature 0."""

    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]


def greedy(url: str, prompt: str) -> Greedy:
    body = {
        "model": "agent",
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": 24,
        "logprobs": True,
        "return_token_ids": True,
    }
    reply = httpx.post(url + "/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
    choice = reply["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return Greedy(reply["prompt_token_ids"], choice["token_ids"], logprobs)


def greedy_by_transformers(folder: Path, reply: Greedy) -> Greedy:
    """What the weights of a folder answer, token by token, after what was said before it."""
    penalty = RepetitionPenaltyLogitsProcessor(DEFAULT_REPETITION_PENALTY)
    said = torch.tensor([reply.prompt_ids + reply.ids])
    first = len(reply.prompt_ids)
    with torch.no_grad():
        logits = load_causal_lm(folder)(input_ids=said).logits[0]
    own = Greedy(reply.prompt_ids, [], [])
    for at in range(first, said.shape[1]):
        logprob, token = penalty(said[:, :at], logits[at - 1 : at]).log_softmax(-1)[0].max(-1)
        own.ids.append(int(token))
        own.logprobs.append(float(logprob))
    return own


def greedy_by_fresh_engine(folder: Path, tmp_path: Path) -> list[Greedy]:
    port = free_port()
    config = Config.model_validate(
        {
            "root_dir": str(tmp_path / "data"),
            "model": {"path": str(folder)},
            "explorer": {"engines": [{"name": "fresh", "url": f"http://127.0.0.1:{port}"}]},
            "engine": {"dtype": "float32", "max_model_len": 256},
        }
    )
    file = write_config(config, tmp_path / "fresh.yaml")
    with Process(["engine", "-c", str(file)], tmp_path / "fresh.log") as engine:
        wait_for(lambda: "ready" in engine.output() or not engine.alive, "a fresh engine", ENGINE_START_S)
        fresh = [greedy(f"http://127.0.0.1:{port}", prompt) for prompt in PROMPTS]
        assert engine.stop(60) == 0
    return fresh


def test_after_a_reload_the_engine_answers_like_a_fresh_one_on_that_versions_folder(live, tmp_path):
    """Fresh are Transformers, and in the long form an engine too."""
    before = [greedy(live.engine_url, prompt) for prompt in PROMPTS]  # and their prefixes are in its cache now
    version = live.learn(16, temperature=1.0)
    reloaded = [greedy(live.engine_url, prompt) for prompt in PROMPTS]
    again = [greedy(live.engine_url, prompt) for prompt in PROMPTS]  # from the new cache
    assert live.status()["versions"]["serving"] == version, "another version came in between"

    folder = tmp_path / "version"
    shutil.copytree(live.config.root / f"versions/v{version:06d}", folder)
    (folder / "MANIFEST.json").unlink()
    all_fresh = [[greedy_by_transformers(folder, reply) for reply in reloaded]]
    if FULL:
        all_fresh.append(greedy_by_fresh_engine(folder, tmp_path))

    for all_of_one in all_fresh:
        for old, new, new_2, fresh in zip(before, reloaded, again, all_of_one, strict=True):
            assert new.ids == new_2.ids == fresh.ids
            assert np.abs(np.subtract(new.logprobs, fresh.logprobs)).max() < LOGPROB_TOLERANCE
            assert np.abs(np.subtract(new_2.logprobs, fresh.logprobs)).max() < LOGPROB_TOLERANCE
            learned = old.ids != new.ids or np.abs(np.subtract(old.logprobs, new.logprobs)).max() > LOGPROB_TOLERANCE
            assert learned, "nothing was learned"
