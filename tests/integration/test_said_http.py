"""From feedback over HTTP to moved weights: preferences, ratings and corrections, by one explorer and one ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shared.config import TrainerConfig
from shared.experience import Experience
from shared.ledger import queries, transitions
from tests.integration.test_update import build
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer, make_config
from trainer_service.answers import answer_tokenizer
from trainer_service.batch import make_batch

PROMPT, GOOD, BAD = [1, 4, 20], [30, 2], [40, 2]  # the tiny model's words w22 and w32, and its end of a turn
ALL = {"algorithms": {"dpo": 1.0, "kto": 1.0, "sft": 1.0}}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[Experience]:
    """What a trainer of all three algorithms claims after four chats."""
    engine, settings = ScriptedEngine(), TrainerConfig(**ALL)
    config = make_config(tmp_path_factory.mktemp("root"), [engine.url])
    explorer = RunningExplorer(config.model_copy(update={"trainer": settings})).wait_ready()

    def chat(reply: list[int]) -> str:
        engine.script.prompt_ids, engine.script.reply_ids = PROMPT, reply
        engine.script.logprobs = [-1.0] * len(reply)
        return str(explorer.chat().raise_for_status().json()["id"])

    def say(name: str, **body: Any) -> None:
        explorer.http.post("/feedback", json={"msg_ids": [name], **body}).raise_for_status()

    good, bad, wrong, _ = (chat(reply) for reply in (GOOD, BAD, BAD, GOOD))
    say(good, preferred_over=[bad, "chatcmpl-nobody"], rating="up")
    say(bad, rating="down")
    say(wrong, correction="w22")
    committed = explorer.http.post("/commit").raise_for_status().json()
    with explorer.ledger.write() as connection:
        batch = transitions.claim(connection, owner="t", at_least=1, at_most=64, lease_s=60)
        lease = queries.load_lease(connection, batch, 208, settings.learns_from)
    explorer.stop()
    engine.stop()
    assert committed == {"status": "success", "committed": 3, "ready": 3}
    answers = answer_tokenizer(settings, model, vocabulary=208, context=256)
    return answers.with_corrections(lease.rows)


def test_all_that_was_said_is_in_the_batch(rows):
    batch = make_batch(rows)
    said = [[batch.sequences[place].token_actions.tolist() for place in pair] for pair in batch.pairs]
    assert said == [[GOOD, BAD], [GOOD, BAD]], "the preference, and the correction over what it corrects"
    assert [batch.sequences[place].token_ids.tolist() for place in batch.written] == [[*PROMPT, *GOOD]]
    assert batch.ratings == {0: True, 1: False}
    assert batch.unused == {"preference_unknown": 1}


@pytest.mark.parametrize("settings", [{"algorithm": "dpo"}, {"algorithm": "kto"}, {"algorithm": "sft"}, ALL])
def test_what_was_said_moves_the_weights_where_it_should(settings, rows, tmp_path, model):
    update, policy = build(tmp_path, model, learning_rate=1e-3, **settings)
    prompt = torch.tensor([PROMPT])

    def lead() -> float:
        """How much likelier the good reply's word is than the bad one's, nats."""
        with torch.no_grad():
            logits = policy(input_ids=prompt).logits[0, -1]
        return float(logits[GOOD[0]] - logits[BAD[0]])

    before = lead()
    stats = [update.update(make_batch(rows), step=step, version=0) for step in range(4)]
    assert lead() > before + 0.2
    assert stats[-1]["unused/preference_unknown"] == 1
    name = settings.get("algorithm")
    if name in ("dpo", "kto"):
        assert stats[-1]["accuracy"] == 1 and stats[-1]["grad_norm"] > 0
